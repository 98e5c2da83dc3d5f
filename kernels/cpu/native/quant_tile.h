/* One tile of ROWS rows and NP panels side by side: tile_<KIND>_<ROWS>x<NP>, see tiles.h. KIND: bits of the integers, or 0
 * where they are floats already, in `plain`.
 *
 * Adds `groups` groups to acc [ROWS][NP * NR], in units. A group's products with the bare integers are summed first, in
 * the order of the inputs; then scale times that sum is added, then offset times the sum of the group's activations.
 */
#define PER (KIND ? 32 / (KIND + !KIND) : 8) /* inputs of one word */
static __attribute__((noinline)) void NAME(ROWS, NP)(const quant_job *j, const char *rows, const float *sums,
                                                     const char *w, const float *plain, long groups, float *acc)
{
    const long group = j->group, group_bytes = j->group_bytes, panel_bytes = j->panel_bytes, ldx = j->x_bytes / 4;
    const float *x = (const float *)rows;
    for (long g = 0; g < groups; g++, w += group_bytes, x += group) {
        vf part[ROWS][NP * NV];
        UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < NP * NV; v++) part[r][v] = (vf){0};
#if KIND
        const char *at = w + quant_scale_bytes(KIND);
        /* where these panels end, the next ones begin NP - 1 further on */
        const long ahead = AHEAD * group_bytes + (g + AHEAD < groups ? 0 : (NP - 1) * panel_bytes);
#endif
        for (long k = 0; k < group; k += PER) {
            UNROLL for (int p = 0; p < NP; p++) {
#if KIND
                const char *from = at + p * panel_bytes + k * KIND / 8 * NR;
                UNROLL for (int line = 0; line < NR * 4; line += 64) __builtin_prefetch(from + ahead + line);
                vu words[NV];
                UNROLL for (int v = 0; v < NV; v++) words[v] = *(const vu_mem *)(from + v * VL * 4);
#endif
                UNROLL for (int i = 0; i < PER; i++) {
                    vf b[NV];
#if KIND
                    UNROLL for (int v = 0; v < NV; v++) b[v] = integers(words[v], i, KIND);
#else
                    UNROLL for (int v = 0; v < NV; v++) b[v] = vload(plain + (k + i) * NR + v * VL);
#endif
                    UNROLL for (int r = 0; r < ROWS; r++) {
                        vf a = vset(x[r * ldx + k + i]);
                        UNROLL for (int v = 0; v < NV; v++) part[r][p * NV + v] += a * b[v];
                    }
                }
            }
        }
#if !KIND
        plain += group * NR;
#endif
        UNROLL for (int p = 0; p < NP; p++) UNROLL for (int v = 0; v < NV; v++) {
            const uint16_t *half = (const uint16_t *)(w + p * panel_bytes) + v * VL;
            const vf scale = vload_half(half);
            const vf offset = j->bits == 4 ? vload_half(half + NR) : scale * -128.0f;
            UNROLL for (int r = 0; r < ROWS; r++) {
                float *to = acc + (r * NP + p) * NR + v * VL;
                vf total = vload(to);
                total += scale * part[r][p * NV + v];
                total += offset * vset(sums[r * j->groups + g]);
                vstore(to, total);
            }
        }
    }
}
#undef PER
