/* A block and a length, by vectors of LANES numbers; see _convolution.c. */

typedef float VECTOR __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float HALF(VECTOR) __attribute__((vector_size(2 * LANES), aligned(4), may_alias));
typedef double DOUBLE(VECTOR) __attribute__((vector_size(4 * LANES)));

INLINE void BLOCK(VECTOR)(const record *of, const int rows, const int length, const int vectors, long r, long k,
                          long o) {
    const long at_once = of->width < POSITIONS ? POSITIONS / of->width : 1;
    for (long first = 0; first < of->height; first += at_once) {
        const long last = first + at_once < of->height ? first + at_once : of->height;
        VECTOR sum[rows * length * vectors];
        UNROLLED(int b = 0; b < rows * length * vectors; b++) { sum[b] = (VECTOR){0}; }
        for (long i = first; i < last; i++) {
            const float *x = of->x + i * of->down + r * of->row + k, *g = of->g + i * of->width * of->outputs + o;
            for (long j = 0; j < of->width; j++, x += of->right, g += of->outputs) {
                UNROLLED(int a = 0; a < rows; a++) {
                    UNROLLED(int l = 0; l < length; l++) {
                        UNROLLED(int v = 0; v < vectors; v++) {
                            sum[(a * length + l) * vectors + v] += x[a * of->row + l] * ((const VECTOR *)g)[v];
                        }
                    }
                }
            }
        }
        UNROLLED(int a = 0; a < rows; a++) {
            UNROLLED(int l = 0; l < length; l++) {
                VECTOR *out = (VECTOR *)(of->out + ((r + a) * of->run + k + l) * of->outputs + o);
                UNROLLED(int v = 0; v < vectors; v++) {
                    out[v] = sum[(a * length + l) * vectors + v] + (first ? out[v] : (VECTOR){0});
                }
            }
        }
    }
}

/* The sums over all positions, those of a row first. */
INLINE void SUMS(VECTOR)(const record *of) {
    EACH(o, LANES, of->outputs) {
        VECTOR all = {0};
        for (long i = 0; i < of->height; i++) {
            VECTOR row = {0};
            for (long j = 0; j < of->width; j++)
                row += *(const VECTOR *)(of->g + (i * of->width + j) * of->outputs + o);
            all += row;
        }
        *(VECTOR *)(of->sums + o) = all;
    }
}

/* In float64, where no square of a float32 vanishes or overflows. */
INLINE double LENGTH(VECTOR)(const float *values, long count) {
    DOUBLE(VECTOR) sum[4] = {0};
    long done = 0;
    for (; done + 2 * LANES <= count; done += 2 * LANES) {
        UNROLLED(int s = 0; s < 4; s++) {
            const HALF(VECTOR) some = *(const HALF(VECTOR) *)(values + done + LANES / 2 * s);
            const DOUBLE(VECTOR) value = __builtin_convertvector(some, DOUBLE(VECTOR));
            sum[s] += value * value;
        }
    }
    double all = 0;
    for (; done < count; done++) all += (double)values[done] * values[done];
    sum[0] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    UNROLLED(int j = 0; j < LANES / 2; j++) { all += sum[0][j]; }
    return sqrt(all);
}

#undef VECTOR
#undef LANES
