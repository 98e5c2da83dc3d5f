/* One tile of ROWS rows and NP panels side by side: tile_<KIND>_<ROWS>x<NP>, see tiles.h.
 *
 * `ahead`: bytes from a panel's weights to those fetched meanwhile. Near a panel's end that is NP - 1 panels further on,
 * where the next tile goes on. A tile of one panel goes over inputs j->begin .. j->end - 1 and leaves its sums in j->carry
 * for the rest, if there is one, which then begins with them: float32 as they are, so the sums are the same.
 */
#define DEPTH (KIND == DOT ? 2 : 1) /* inputs of one step */
#define STEP_BYTES (NR * DEPTH * (KIND == F32 ? 4 : 2))
#define STEPS (STEP_BYTES < 64 ? 64 / STEP_BYTES : 1) /* that read one line of a panel, or more */
#define ADD_STEP(k)                                                                                              \
    UNROLL for (int p = 0; p < NP; p++) {                                                                        \
        vf b[NV];                                                                                                \
        load_weights(w + p * panel_bytes + (k) * STEP_BYTES, b, KIND);                                           \
        UNROLL for (int r = 0; r < ROWS; r++) {                                                                  \
            vf a = load_input(x + r * ldx + (k) * 4);                                                            \
            UNROLL for (int v = 0; v < NV; v++)                                                                  \
                acc[r][p * NV + v] = multiply_add(acc[r][p * NV + v], a, b[v], KIND);                            \
        }                                                                                                        \
    }
static __attribute__((noinline)) void NAME(ROWS, NP)(const linear_job *j, long row, long panel, long ahead)
{
    vf acc[ROWS][NP * NV];
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < NP * NV; v++) 
        acc[r][v] = NP == 1 && j->begin > 0 ? vload(j->carry + ((row - j->top) * NV + r * NV + v) * VL) : (vf){0};
    const char *w = j->w + panel * j->panel_bytes;
    const long panel_bytes = j->panel_bytes, ldx = j->ldx * (KIND == DOT ? 2 : 4), count = j->end / DEPTH;
    const char *x = (const char *)j->x + row * ldx;
    long k = j->begin / DEPTH;
    for (; k + STEPS <= count; k += STEPS) {
        const char *next = w + k * STEP_BYTES + ahead;
        if (NP > 1 && k * STEP_BYTES + ahead >= panel_bytes) next += (NP - 1) * panel_bytes;
        UNROLL for (int p = 0; p < NP; p++) UNROLL for (int line = 0; line < STEPS * STEP_BYTES; line += 64)
            __builtin_prefetch(next + p * panel_bytes + line);
        UNROLL for (int s = 0; s < STEPS; s++) ADD_STEP(k + s)
    }
    for (; k < count; k++) ADD_STEP(k)
    if (NP == 1 && j->end < j->K) {
        UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < NV; v++)
            vstore(j->carry + ((row - j->top) * NV + r * NV + v) * VL, acc[r][v]);
        return;
    }
    float out[ROWS][NP * NR];
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < NP * NV; v++) vstore(out[r] + v * VL, acc[r][v]);
    store_tile(j->y, j->N, j->bias, KIND == F32, row, panel * NR, ROWS, NP * NR, out[0]);
}
#undef DEPTH
#undef STEP_BYTES
#undef STEPS
#undef ADD_STEP
