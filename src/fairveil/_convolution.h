/* A block, the sums and a length, by vectors of LANES numbers; see _convolution.c. */

typedef float VECTOR __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float HALF(VECTOR) __attribute__((vector_size(2 * LANES), aligned(4), may_alias));
typedef double DOUBLE(VECTOR) __attribute__((vector_size(4 * LANES)));

INLINE void BLOCK(VECTOR)(const record *of, const int rows, const int length, const int vectors, long r, long k,
                          long o) {
    const long down = of->width < POSITIONS ? POSITIONS / of->width : 1; /* rows and columns added up at a stretch */
    for (long top = 0; top < of->height; top += down) {
        for (long left = 0; left < of->width; left += POSITIONS) {
            const long bottom = top + down < of->height ? top + down : of->height;
            const long right = left + POSITIONS < of->width ? left + POSITIONS : of->width;
            VECTOR sum[rows * length * vectors];
            UNROLLED(int b = 0; b < rows * length * vectors; b++) { sum[b] = (VECTOR){0}; }
            for (long i = top; i < bottom; i++) {
                const float *x = of->x + i * of->down + left * of->right + r * of->row + k;
                const float *g = of->g + (i * of->width + left) * of->outputs + o;
                for (long j = left; j < right; j++, x += of->right, g += of->outputs) {
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
                        out[v] = sum[(a * length + l) * vectors + v] + (top || left ? out[v] : (VECTOR){0});
                    }
                }
            }
        }
    }
}

/* The sums over all positions, in stretches too. */
INLINE void SUMS(VECTOR)(const record *of) {
    const long positions = of->height * of->width;
    EACH(o, LANES, of->outputs) {
        VECTOR all = {0};
        for (long first = 0; first < positions; first += POSITIONS) {
            const long last = first + POSITIONS < positions ? first + POSITIONS : positions;
            VECTOR some = {0};
            for (long t = first; t < last; t++) some += *(const VECTOR *)(of->g + t * of->outputs + o);
            all += some;
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
