/* Gaussian noise from AES-256 in counter mode: the compiled form of `Stream.add_noise`.

   A group is 16 words of 64 bits, 8 radius words w and 8 angle words a. It makes 16 values, 8 x and 8 y:

       x = r cos(2 pi v), y = r sin(2 pi v),   r = sqrt(-2 ln u), u = (|w| + 1/2) / 2^63, v = a / 2^64; w, a signed.

   It is written with vectors of 8 lanes, which the compiler maps to one register (AVX-512), two (AVX2) or more; only
   AES needs intrinsics. Two passes over a piece that fits the first-level cache: the whole chain (AES, logarithm, root,
   turn, rounding) is longer than a processor can look ahead. No branch and no address depends on a random word, so
   that the time taken says nothing about the noise.

   The polynomials interpolate their functions at the Chebyshev nodes (solved with 60 digits, then rounded to double).
   The relative errors given are those of the rounded coefficients; evaluation adds a few units of the last place. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if !defined(__GNUC__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "needs the vectors of GCC or Clang, and little-endian words; without this module the pure form is used"
#endif
#ifdef __x86_64__
#include <immintrin.h>
typedef __m128i block_of_16;
#else
typedef struct { char bytes[16]; } block_of_16;
#endif

enum {
    LANES = 8,
    GROUP = 2 * LANES,  /* values, and words of bits */
    BLOCKS = GROUP / 2, /* of AES, 16 bytes each */
    PIECE = 64,         /* groups */
    ROUNDS = 14,
};

typedef double reals __attribute__((vector_size(8 * LANES)));
typedef uint64_t words __attribute__((vector_size(8 * LANES)));
typedef int64_t integers __attribute__((vector_size(8 * LANES)));

#define INLINE static inline __attribute__((always_inline))
#define ALIGNED __attribute__((aligned(64)))
#define EACH_LANE for (int j = 0; j < LANES; j++) /* loads, stores and functions, which become single instructions */

/* bits of doubles */
static const uint64_t SIGN = 0x8000000000000000, FRACTION = 0x000fffffffffffff, ROOT_HALF = 0x3fe6a09e667f3bcd,
                      ONE = 0x3ff0000000000000, TWO_52 = 0x4330000000000000, TWO_84 = 0x4530000000000000;

/* -2 ln u.

   u = 2^k m with m in [sqrt(1/2), sqrt(2)): near u = 1 then k = 0, and nothing cancels. ln m = 2 artanh(s) with
   s = (m - 1)/(m + 1), and -4 artanh(s)/s is a polynomial of degree 6 in z = s² <= 0.0295: error 2.3e-16. */
INLINE void square_radius(const uint64_t *bits, double *square, const int converts) {
    words w;
    reals n;
    EACH_LANE w[j] = bits[j];
    if (converts) /* the processor makes doubles of 64-bit integers */
        n = __builtin_convertvector((integers)w, reals);
    else /* 2^84 + 2^63 + 2^32 high and 2^52 + low are exact, and their sum is rounded once: the same double */
        n = (reals)(w >> 32 ^ (TWO_84 | 1ull << 31)) - (0x1p84 + 0x1p63 + 0x1p52) + (reals)((w & 0xffffffff) | TWO_52);
    n = (reals)((words)n & ~SIGN) + 0.5;
    const words v = (words)n + (ONE - ROOT_HALF);
    const reals k = (reals)(v >> 52 | TWO_52) - (0x1p52 + 1023 + 63); /* of n / 2^63 */
    const reals m = (reals)((v & FRACTION) + ROOT_HALF);
    const reals s = (m - 1) / (m + 1), z = s * s, zz = z * z;
    const reals low = (-0x1.0000000000001p+2 - 0x1.5555555552d50p+0 * z) +
                      (-0x1.999999a435066p-1 - 0x1.249240b87155dp-1 * z) * zz;
    const reals high = (-0x1.c722cceee92f4p-2 - 0x1.732320a9c93b0p-2 * z) - 0x1.58d5d4a93822dp-2 * zz;
    const reals result = k * -0x1.62e42fefa39efp+0 + s * (low + high * (zz * zz));
    EACH_LANE square[j] = result[j];
}

/* x and y, times `std`, of a squared radius and an angle word.

   4v = q + t: a whole number of quarter turns and |t| <= 1/2, of which 52 bits are kept. sin(pi/2 t)/t and cos(pi/2 t)
   are polynomials of degree 6 in z = t² <= 1/4: errors 3.9e-17 and 1.5e-16. The signs are put on the products, not on
   the radius: so the compiler cannot fuse these with the sum they are added to, and all forms round alike. */
INLINE void turn(const double *square, const uint64_t *bits, double std, reals *x, reals *y) {
    words a;
    reals r;
    EACH_LANE a[j] = bits[j] + (1ull << 61); /* half a quarter: now the two high bits are q, the others t + 1/2 */
    EACH_LANE r[j] = __builtin_sqrt(square[j]);
    r *= std;
    const reals t = (reals)((a >> 10 & FRACTION) | ONE) - 1.5, z = t * t;
    const reals sine =
        t * (0x1.921fb54442d18p+0 +
             z * (-0x1.4abbce625be41p-1 +
                  z * (0x1.466bc677587f8p-4 +
                       z * (-0x1.32d2cce2e5b19p-8 +
                            z * (0x1.50782fda12d96p-13 + z * (-0x1.e30071afc3e59p-19 + z * 0x1.e3f38399551bfp-25))))));
    const reals cosine =
        1.0 + z * (-0x1.3bd3cc9be458bp+0 +
                   z * (0x1.03c1f081b0780p-2 +
                        z * (-0x1.55d3c7dbfd139p-6 +
                             z * (0x1.e1f4fb60281f6p-11 + z * (-0x1.a6c9c1be9eb49p-16 + z * 0x1.f3dbcea61b1a4p-22)))));
    const words odd = a << 1, p = (words)(r * cosine), q = (words)(r * sine);
    const words change = (p ^ q) & (words)((integers)odd >> 63);
    *x = (reals)(p ^ change ^ ((a ^ odd) & SIGN));
    *y = (reals)(q ^ change ^ (a & SIGN));
}

/* total += value for 8 values, rounded to the grid if it is not 0. The last 0.0 makes -0 a 0: its sign would tell the
   halves of a cell of the grid apart. */
INLINE void update(void *total, const int single, const reals *value, double grid) {
    float *floats = total;
    double *doubles = total;
    reals sum;
    if (single)
        EACH_LANE sum[j] = floats[j];
    else
        EACH_LANE sum[j] = doubles[j];
    sum += *value;
    if (grid) {
        sum *= 1 / grid;
        EACH_LANE sum[j] = __builtin_rint(sum[j]);
        sum = sum * grid + 0.0;
    }
    if (single)
        EACH_LANE floats[j] = (float)sum[j];
    else
        EACH_LANE doubles[j] = sum[j];
}

typedef struct {
    char *total;
    int single; /* float, not double */
    double std, grid;
} job;

INLINE void second_pass(job to, const int single, size_t groups, const double *square, const uint64_t *bits) {
    const size_t half = LANES * (single ? sizeof(float) : sizeof(double));
    for (size_t g = 0; g < groups; g++) {
        reals x, y;
        turn(square + LANES * g, bits + GROUP * g + LANES, to.std, &x, &y);
        update(to.total + 2 * half * g, single, &x, to.grid);
        update(to.total + 2 * half * g + half, single, &y, to.grid);
    }
}

/* A form of the kernel: noise for at most a piece. The source is the bits themselves (plain form) or AES round keys. */
typedef void form(job to, size_t groups, const void *source, uint64_t block);

INLINE void from_bits(job to, size_t groups, const uint64_t *bits) {
    double square[PIECE * LANES] ALIGNED;
    for (size_t g = 0; g < groups; g++) square_radius(bits + GROUP * g, square + LANES * g, 0);
    to.single ? second_pass(to, 1, groups, square, bits) : second_pass(to, 0, groups, square, bits);
}

static void plain(job to, size_t groups, const void *source, uint64_t block) {
    uint64_t bits[PIECE * GROUP] ALIGNED; /* the source need not be */
    memcpy(bits, (const char *)source + 16 * block, 16 * BLOCKS * groups);
    from_bits(to, groups, bits);
}

#ifdef __x86_64__

#define UNROLLED _Pragma("GCC unroll 16") for

/* The key schedule. AESENCLAST gives SubWord: among four equal columns its ShiftRows changes nothing. */
__attribute__((target("aes,ssse3"))) static void expand(const void *key, block_of_16 *round) {
    const __m128i rotate = _mm_set1_epi32(0x0c0f0e0d);
    memcpy(round, key, 32);
    for (int i = 2; i <= ROUNDS; i++) {
        __m128i word = _mm_shuffle_epi32(round[i - 1], 0xff), constant = _mm_setzero_si128(), k = round[i - 2];
        if (i % 2 == 0) word = _mm_shuffle_epi8(word, rotate), constant = _mm_set1_epi32(1 << (i / 2 - 1));
        k = _mm_xor_si128(k, _mm_slli_si128(k, 4));
        k = _mm_xor_si128(k, _mm_slli_si128(k, 8));
        round[i] = _mm_xor_si128(k, _mm_aesenclast_si128(word, constant));
    }
}

__attribute__((target("avx2,fma,aes"))) static void avx2(job to, size_t groups, const void *source, uint64_t block) {
    const __m128i *key = source;
    uint64_t bits[PIECE * GROUP] ALIGNED;
    for (size_t g = 0; g < groups; g++) {
        __m128i state[BLOCKS], *out = (__m128i *)(bits + GROUP * g);
        UNROLLED(int b = 0; b < BLOCKS; b++) {
            state[b] = _mm_xor_si128(_mm_set_epi64x(__builtin_bswap64(block++), 0), key[0]);
        }
        UNROLLED(int i = 1; i < ROUNDS; i++) {
            UNROLLED(int b = 0; b < BLOCKS; b++) { state[b] = _mm_aesenc_si128(state[b], key[i]); }
        }
        UNROLLED(int b = 0; b < BLOCKS; b++) { out[b] = _mm_aesenclast_si128(state[b], key[ROUNDS]); }
    }
    from_bits(to, groups, bits);
}

/* The bits of a group are made beside the logarithms of the one before: AES keeps one port busy, these the other. */
__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,vaes"))) static void avx512(job to, size_t groups,
                                                                                      const void *source,
                                                                                      uint64_t block) {
    __m512i key[ROUNDS + 1], counter = _mm512_set_epi64(block + 3, 0, block + 2, 0, block + 1, 0, block, 0);
    for (int i = 0; i <= ROUNDS; i++) key[i] = _mm512_broadcast_i32x4(((const __m128i *)source)[i]);
    const __m512i big_endian = _mm512_broadcast_i32x4(_mm_set_epi64x(0x08090a0b0c0d0e0f, 0x0706050403020100));
    const __m512i four = _mm512_set_epi64(4, 0, 4, 0, 4, 0, 4, 0);
    uint64_t bits[PIECE * GROUP] ALIGNED;
    double square[PIECE * LANES] ALIGNED;
    for (size_t g = 0; g < groups; g++) {
        __m512i state[2], *out = (__m512i *)(bits + GROUP * g);
        UNROLLED(int b = 0; b < 2; b++) {
            state[b] = _mm512_xor_si512(_mm512_shuffle_epi8(counter, big_endian), key[0]);
            counter = _mm512_add_epi64(counter, four);
        }
        UNROLLED(int i = 1; i < ROUNDS; i++) {
            UNROLLED(int b = 0; b < 2; b++) { state[b] = _mm512_aesenc_epi128(state[b], key[i]); }
        }
        UNROLLED(int b = 0; b < 2; b++) { out[b] = _mm512_aesenclast_epi128(state[b], key[ROUNDS]); }
        if (g > 0) square_radius(bits + GROUP * (g - 1), square + LANES * (g - 1), 1);
    }
    square_radius(bits + GROUP * (groups - 1), square + LANES * (groups - 1), 1);
    to.single ? second_pass(to, 1, groups, square, bits) : second_pass(to, 0, groups, square, bits);
}

static form *const forms[] = {plain, avx2, avx512};

#define HAS __builtin_cpu_supports
static int best_level(void) {
    __builtin_cpu_init();
    if (!HAS("avx2") || !HAS("fma") || !HAS("aes")) return 0;
    return HAS("avx512f") && HAS("avx512dq") && HAS("avx512bw") && HAS("avx512vl") && HAS("vaes") ? 2 : 1;
}

#else

static void expand(const void *key, block_of_16 *round) { memcpy(round, key, 32); } /* never called */
static form *const forms[] = {plain};
static int best_level(void) { return 0; }

#endif

PyDoc_STRVAR(add_doc,
             "add(total, std, grid, source, block, level)\n--\n\n"
             "Add std times normal values to the total, in place, rounded to a power of two (grid 0: not rounded).\n\n"
             "The source is the AES key, and the bits are those from this block on (level 1: AVX2, 2: AVX-512);\n"
             "or it is the bits, whatever the block (level 0).");

static PyObject *add(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *array;
    Py_buffer total, source;
    job to;
    unsigned long long block;
    int level;
    if (!PyArg_ParseTuple(args, "Oddy*Ki", &array, &to.std, &to.grid, &source, &block, &level)) return NULL;
    if (PyObject_GetBuffer(array, &total, PyBUF_WRITABLE | PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0) {
        PyBuffer_Release(&source);
        return NULL;
    }
    const size_t size = total.itemsize, rest = total.len / size % GROUP;
    size_t groups = total.len / size / GROUP;
    to.total = total.buf;
    to.single = !strcmp(total.format, "f");
    if (!to.single && strcmp(total.format, "d")) {
        PyErr_SetString(PyExc_TypeError, "the total must be float32 or float64");
    } else if (level < 0 || level > best_level()) {
        PyErr_SetString(PyExc_ValueError, "this processor has no such level");
    } else if ((size_t)source.len != (level ? 32 : 16 * BLOCKS * (groups + (rest > 0)))) {
        PyErr_SetString(PyExc_ValueError, "the source has the wrong length");
    } else {
        block_of_16 round[ROUNDS + 1];
        const void *from = source.buf;
        if (level)
            expand(from, round), from = round;
        else
            block = 0;
        for (size_t now; groups; groups -= now, block += BLOCKS * now, to.total += GROUP * now * size) {
            now = groups < PIECE ? groups : PIECE;
            forms[level](to, now, from, block);
        }
        if (rest) { /* a whole group beside the total */
            char last[GROUP * sizeof(double)] ALIGNED = {0};
            memcpy(last, to.total, rest * size);
            forms[level]((job){last, to.single, to.std, to.grid}, 1, from, block);
            memcpy(to.total, last, rest * size);
        }
        memset(round, 0, sizeof round);
        __asm__ volatile("" ::"r"(round) : "memory"); /* or the compiler would leave the wiping out */
    }
    PyBuffer_Release(&total);
    PyBuffer_Release(&source);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static int fill(PyObject *module) { return PyModule_AddIntConstant(module, "LEVEL", best_level()); }

static PyMethodDef methods[] = {{"add", add, METH_VARARGS, add_doc}, {NULL, NULL, 0, NULL}};
static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill}, {0, NULL}};
static struct PyModuleDef noise = {
    PyModuleDef_HEAD_INIT, .m_name = "_noise", .m_methods = methods, .m_slots = slots};

PyMODINIT_FUNC PyInit__noise(void) { return PyModuleDef_Init(&noise); }
