/* One tile of ROWS rows and NP panels side by side, in products of bf16 pairs: tile_<KIND>_<ROWS>x<NP>, see tiles.h.
 * KIND: bits of the integers.
 *
 * Adds `groups` groups to acc [ROWS][NP * NR], in units. A group's products with the integers are summed first, pair by
 * pair (8 bits: from -128 times the sum of the activations on); then scale times that sum is added, then (4 bits) offset
 * times the sum of the activations.
 */
#define PAIRS (16 / KIND) /* of one word */
static __attribute__((noinline)) void NAME(ROWS, NP)(const quant_job *j, const char *rows, const float *sums,
                                                     const char *w, const float *plain, long groups, float *acc)
{
    const long group_bytes = j->group_bytes, panel_bytes = j->panel_bytes, ldx = j->x_bytes / 4, stride = j->groups;
    const long pairs = j->group / 2, scale_bytes = quant_scale_bytes(KIND);
    const uint32_t *x = (const uint32_t *)rows;
    for (long g = 0; g < groups; g++, w += group_bytes, x += pairs) {
        vf part[ROWS][NP * NV];
        UNROLL for (int r = 0; r < ROWS; r++) {
            const vf start = KIND == 8 ? vset(sums[r * stride + g] * -128.0f) : (vf){0};
            UNROLL for (int v = 0; v < NP * NV; v++) part[r][v] = start;
        }
        const char *at = w + scale_bytes;
        /* where these panels end, the next ones begin NP - 1 further on */
        const long ahead = AHEAD * group_bytes + (g + AHEAD < groups ? 0 : (NP - 1) * panel_bytes);
        for (long k = 0; k < pairs; k += PAIRS) {
            UNROLL for (int p = 0; p < NP; p++) {
                const char *from = at + p * panel_bytes + k / PAIRS * NR * 4;
                UNROLL for (int line = 0; line < NR * 4; line += 64) __builtin_prefetch(from + ahead + line);
                vu words[NV];
                UNROLL for (int v = 0; v < NV; v++) words[v] = *(const vu_mem *)(from + v * VL * 4);
                UNROLL for (int i = 0; i < PAIRS; i++) {
                    vf b[NV];
                    UNROLL for (int v = 0; v < NV; v++) b[v] = integer_pairs(words[v], i, KIND);
                    UNROLL for (int r = 0; r < ROWS; r++) {
                        const vf a = (vf)((vu){0} + x[r * ldx + k + i]);
                        UNROLL for (int v = 0; v < NV; v++) part[r][p * NV + v] = dot(part[r][p * NV + v], a, b[v]);
                    }
                }
            }
        }
        UNROLL for (int p = 0; p < NP; p++) UNROLL for (int v = 0; v < NV; v++) {
            const uint16_t *half = (const uint16_t *)(w + p * panel_bytes) + v * VL;
            const vf scale = vload_half(half);
            UNROLL for (int r = 0; r < ROWS; r++) {
                float *to = acc + (r * NP + p) * NR + v * VL;
                vf total = vload(to) + scale * part[r][p * NV + v];
                if (KIND == 4) total += vload_half(half + NR) * vset(sums[r * stride + g]);
                vstore(to, total);
            }
        }
    }
}
#undef PAIRS
