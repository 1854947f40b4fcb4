/* What each record did to the kernel of a convolution: its gradients, and their lengths.

       out[n, r, s, c, o] = sum over i, j of x[n, i sh + r dh, j sw + s, c] g[n, i, j, o]

   and out[n, ...] has a companion for the bias: sums[n, o] = sum over i, j of g[n, i, j, o].

   The channels are last, so x along (s, c) is one run of numbers. A block of some kernel rows by some numbers of the
   run by some vectors of outputs stays in registers while all positions are added up. Where an axis is no multiple of
   the block, the last block overlaps the one before and writes the same numbers again. Every record is worked on alone:
   its bits depend on no other. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#if !defined(__x86_64__) || !defined(__GNUC__)
#error "made for the vectors of x86; without this module matrix products do the same"
#endif

enum { POSITIONS = 1024 }; /* that float32 adds up at a stretch: rounding grows with their number */

#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 32") for

/* One record. Distances are in numbers. */
typedef struct {
    const float *x, *g; /* x with its margins */
    float *out, *sums;
    long height, width;         /* of g */
    long outputs, run, kernels; /* o, kw c, kh */
    long down, right;           /* from a position to the next below or beside, in x */
    long row;                   /* from one kernel row to the next, in x */
} record;

/* Over a length in steps, the last one as far back as it must be. */
#define EACH(at, step, all)                                                                                            \
    for (long at = 0, left = (all); left > 0; left -= (step), at = left < (step) ? (all) - (step) : at + (step))

#define JOINED(a, b) a##b
#define NAMED(a, b) JOINED(a, b)
#define HALF(vector) NAMED(vector, _half)
#define DOUBLE(vector) NAMED(vector, _double)
#define BLOCK(vector) NAMED(vector, _block)
#define SUMS(vector) NAMED(vector, _sums)
#define LENGTH(vector) NAMED(vector, _length)

#define VECTOR wide
#define LANES 16
#include "_convolution.h"

#define VECTOR narrow
#define LANES 8
#include "_convolution.h"

/* Write one record's gradient and sums, and return the length of the former. */
#define FORM(TARGET, VECTOR, LANES, ROWS, COLUMNS, VECTORS)                                                            \
    __attribute__((target(TARGET))) static double VECTOR##_##ROWS##_##COLUMNS##_##VECTORS(const record *of) {          \
        EACH(o, LANES * VECTORS, of->outputs) {                                                                        \
            EACH(r, ROWS, of->kernels) {                                                                               \
                EACH(k, COLUMNS, of->run) { VECTOR##_block(of, ROWS, COLUMNS, VECTORS, r, k, o); }                     \
            }                                                                                                          \
        }                                                                                                              \
        VECTOR##_sums(of);                                                                                             \
        return VECTOR##_length(of->out, of->kernels * of->run * of->outputs);                                          \
    }
#define WIDE(...) FORM("avx512f", wide, 16, __VA_ARGS__)
#define NARROW(...) FORM("avx2,fma", narrow, 8, __VA_ARGS__)

/* Blocks that fill the registers: 32 of AVX-512, 16 of AVX2. */
WIDE(1, 8, 2)
WIDE(1, 10, 2)
WIDE(1, 12, 2)
WIDE(1, 9, 1)
WIDE(1, 16, 1)
WIDE(1, 24, 1)
WIDE(3, 3, 1)
WIDE(5, 5, 1)
NARROW(1, 4, 2)
NARROW(1, 5, 2)
NARROW(1, 6, 2)
NARROW(1, 8, 1)
NARROW(1, 12, 1)
NARROW(2, 5, 1)
NARROW(3, 3, 1)

typedef struct {
    double (*run)(const record *of);
    int rows, length, vectors;
} form;
#define AS(KIND, ROWS, COLUMNS, VECTORS) {KIND##_##ROWS##_##COLUMNS##_##VECTORS, ROWS, COLUMNS, VECTORS}
static const form wide_forms[] = {AS(wide, 1, 8, 2),  AS(wide, 1, 10, 2), AS(wide, 1, 12, 2), AS(wide, 1, 9, 1),
                                  AS(wide, 1, 16, 1), AS(wide, 1, 24, 1), AS(wide, 3, 3, 1),  AS(wide, 5, 5, 1)};
static const form narrow_forms[] = {AS(narrow, 1, 4, 2),  AS(narrow, 1, 5, 2), AS(narrow, 1, 6, 2), AS(narrow, 1, 8, 1),
                                    AS(narrow, 1, 12, 1), AS(narrow, 2, 5, 1), AS(narrow, 3, 3, 1)};
static const struct {
    const form *forms;
    int count, lanes;
} levels[] = {{NULL, 0, 0},
              {narrow_forms, sizeof narrow_forms / sizeof *narrow_forms, 8},
              {wide_forms, sizeof wide_forms / sizeof *wide_forms, 16}};

#define HAS __builtin_cpu_supports
static int best_level(void) {
    __builtin_cpu_init();
    return HAS("avx512f") ? 2 : HAS("avx2") && HAS("fma") ? 1 : 0;
}

static long times(long all, long step) { return (all + step - 1) / step; }

/* The form that takes the fewest cycles, if one fits: for each position and block two products or two loads a cycle,
   and four cycles until a sum can be added to again. */
static const form *best_form(int level, const record *of) {
    const form *best = NULL;
    long least = 0;
    for (int f = 0; f < levels[level].count; f++) {
        const form *one = &levels[level].forms[f];
        const long lanes = levels[level].lanes * one->vectors, numbers = one->rows * one->length;
        if (one->rows > of->kernels || one->length > of->run || lanes > of->outputs) continue;
        long half_cycles = numbers * one->vectors;
        if (half_cycles < numbers + one->vectors) half_cycles = numbers + one->vectors;
        if (half_cycles < 8) half_cycles = 8;
        half_cycles *= times(of->outputs, lanes) * times(of->kernels, one->rows) * times(of->run, one->length);
        if (!best || half_cycles <= least) best = one, least = half_cycles;
    }
    return best;
}

PyDoc_STRVAR(
    gradients_doc,
    "gradients(x, g, out, sums, lengths, stride, padding, dilation, level)\n--\n\n"
    "Write the gradient of each record into out (n, kh, kw, c, o), its length into lengths (n,), and the\n"
    "gradient of the bias into sums (n, o).\n\n"
    "x is (n, H, W, c), g (n, h, w, o), both float32; stride and padding are pairs, dilation is that of kernel\n"
    "rows (that along a row is 1). Level 1 is AVX2, 2 AVX-512. Whether there is a form for these shapes is\n"
    "returned: if not, nothing is written.");

/* A buffer of this many axes, or an error. */
static int get(PyObject *array, Py_buffer *buffer, int axes, const char *format, int writable) {
    const int flags = PyBUF_FORMAT | PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(array, buffer, flags) < 0) return 0;
    if (buffer->ndim == axes && !strcmp(buffer->format, format)) return 1;
    PyErr_Format(PyExc_TypeError, "needs %d axes of type %s", axes, format);
    PyBuffer_Release(buffer);
    return 0;
}

static void work(const form *with, record of, long records, const float *x, const Py_ssize_t *image, long above,
                 long beside, float *padded, double *lengths) {
    const long across = (image[2] + 2 * beside) * image[3], line = image[2] * image[3];
    of.x = padded;
    for (long n = 0; n < records; n++) {
        for (long i = 0; i < image[1]; i++, x += line)
            memcpy(padded + (i + above) * across + beside * image[3], x, sizeof *x * line);
        lengths[n] = with->run(&of);
        of.g += of.height * of.width * of.outputs;
        of.out += of.kernels * of.run * of.outputs;
        of.sums += of.outputs;
    }
}

static PyObject *gradients(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *array[5], *result = NULL;
    Py_buffer x, g, out, sums, lengths;
    long sh, sw, above, beside, dilation;
    int level;
    if (!PyArg_ParseTuple(args, "OOOOO(ll)(ll)li", &array[0], &array[1], &array[2], &array[3], &array[4], &sh, &sw,
                          &above, &beside, &dilation, &level))
        return NULL;
    if (!get(array[0], &x, 4, "f", 0)) return NULL;
    if (!get(array[1], &g, 4, "f", 0)) goto x_only;
    if (!get(array[2], &out, 5, "f", 1)) goto x_and_g;
    if (!get(array[3], &sums, 2, "f", 1)) goto x_g_and_out;
    if (!get(array[4], &lengths, 1, "d", 1)) goto all_but_lengths;
    const Py_ssize_t *image = x.shape, *back = g.shape, *to = out.shape, n = image[0];
    const long high = image[1] + 2 * above, across = image[2] + 2 * beside, c = image[3];
    const record of = {NULL,  g.buf,     out.buf, sums.buf,        back[1], back[2],
                       to[4], to[2] * c, to[1],   sh * across * c, sw * c,  dilation * across * c};
    if (level < 0 || level > best_level()) {
        PyErr_SetString(PyExc_ValueError, "this processor has no such level");
    } else if (back[0] != n || to[0] != n || lengths.shape[0] != n || to[3] != c || back[3] != to[4] ||
               sums.shape[0] != n || sums.shape[1] != to[4] || sh < 1 || sw < 1 || above < 0 || beside < 0 ||
               dilation < 1 || back[1] < 1 || back[2] < 1 || to[1] < 1 || to[2] < 1 ||
               (back[1] - 1) * sh + (to[1] - 1) * dilation >= high || (back[2] - 1) * sw + to[2] > across) {
        PyErr_SetString(PyExc_ValueError, "these shapes do not go together");
    } else {
        const form *with = best_form(level, &of);
        float *padded = with ? calloc(high * across * c, sizeof *padded) : NULL;
        if (with && !padded) {
            PyErr_NoMemory();
        } else {
            if (with) {
                Py_BEGIN_ALLOW_THREADS;
                work(with, of, n, x.buf, image, above, beside, padded, lengths.buf);
                Py_END_ALLOW_THREADS;
            }
            free(padded);
            result = PyBool_FromLong(with != NULL);
        }
    }
    PyBuffer_Release(&lengths);
all_but_lengths:
    PyBuffer_Release(&sums);
x_g_and_out:
    PyBuffer_Release(&out);
x_and_g:
    PyBuffer_Release(&g);
x_only:
    PyBuffer_Release(&x);
    return result;
}

static int fill(PyObject *module) { return PyModule_AddIntConstant(module, "LEVEL", best_level()); }

static PyMethodDef methods[] = {{"gradients", gradients, METH_VARARGS, gradients_doc}, {NULL, NULL, 0, NULL}};
static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill}, {0, NULL}};
static struct PyModuleDef convolution = {PyModuleDef_HEAD_INIT, .m_name = "_convolution", .m_methods = methods,
                                         .m_slots = slots};

PyMODINIT_FUNC PyInit__convolution(void) { return PyModuleDef_Init(&convolution); }
