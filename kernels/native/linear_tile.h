/* One tile of ROWS rows and NP panels side by side; KIND, ROWS, NP and TILE are defined by the includer. */
static __attribute__((noinline)) void TILE(const linear_job *j, long row, long panel)
{
    vf acc[ROWS][NP * NV];
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < NP * NV; v++) acc[r][v] = (vf){0};
    const char *w = j->w + panel * j->panel_bytes;
    const long panel_bytes = j->panel_bytes, ldx = j->ldx, K = j->K;
#if KIND == DOT
    const bf16 *x = (const bf16 *)j->x + row * ldx;
    for (long k = 0; k < K / 2; k++) {
        UNROLL for (int p = 0; p < NP; p++) {
            const uint32_t *at = (const uint32_t *)(w + p * panel_bytes) + k * NR;
            __builtin_prefetch((const char *)at + 2048);
            UNROLL for (int r = 0; r < ROWS; r++) {
                uint32_t pair;
                memcpy(&pair, x + r * ldx + 2 * k, 4);
                __m512bh a = (__m512bh)_mm512_set1_epi32((int)pair);
                UNROLL for (int v = 0; v < NV; v++)
                    acc[r][p * NV + v] = (vf)_mm512_dpbf16_ps((__m512)acc[r][p * NV + v], a,
                                                              (__m512bh)_mm512_loadu_si512(at + v * VL));
            }
        }
    }
#else
    const float *x = (const float *)j->x + row * ldx;
    const long step = KIND == F32 ? NR * 4 : NR * 2;
    for (long k = 0; k < K; k++) {
        UNROLL for (int p = 0; p < NP; p++) {
            vf b[NV];
            const char *at = w + p * panel_bytes + k * step;
            __builtin_prefetch(at + 1024);
            load_weights(at, b, KIND);
            UNROLL for (int r = 0; r < ROWS; r++) {
                vf a = vset(x[r * ldx + k]);
                UNROLL for (int v = 0; v < NV; v++) acc[r][p * NV + v] += a * b[v];
            }
        }
    }
#endif
    float out[ROWS][NP * NR];
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < NP * NV; v++) vstore(out[r] + v * VL, acc[r][v]);
    store_tile(j->y, j->N, j->bias, KIND == F32, row, panel * NR, ROWS, NP * NR, out[0]);
}
#undef TILE
#undef ROWS
#undef NP
