/* One tile of ROWS rows and NP panels side by side, in products of bf16 pairs: tile_<KIND>_<ROWS>x<NP>, see tiles.h.
 * KIND: 16 and the bits of the integers, or 16 where they are bf16 pairs already, in `plain`.
 *
 * Adds `groups` groups to acc [ROWS][NP * NR], in units. A group's products with the bare integers are summed first, pair
 * by pair in the order of the inputs, from START times the sum of its activations on; then scale times that sum is
 * added, then (4 bits) offset times the sum of the activations.
 */
#define BITS (KIND - 16)
#define PAIRS (BITS == 8 ? 2 : 4) /* of one word */
static __attribute__((noinline)) void NAME(ROWS, NP)(const quant_job *j, const char *rows, const float *sums,
                                                     const char *w, const void *plain, long groups, float *acc)
{
    const long pairs = j->group / 2, group_bytes = j->group_bytes, panel_bytes = j->panel_bytes, ldx = j->x_bytes / 4;
    const long bits = BITS ? BITS : j->bits, scale_bytes = quant_scale_bytes(bits), stride = j->groups;
    const uint32_t *x = (const uint32_t *)rows;
    const float *unpacked = plain, start = START(bits);
    for (long g = 0; g < groups; g++, w += group_bytes, x += pairs) {
        vf part[ROWS][NP * NV];
        UNROLL for (int r = 0; r < ROWS; r++) {
            const vf first = vset(sums[r * stride + g] * start);
            UNROLL for (int v = 0; v < NP * NV; v++) part[r][v] = first;
        }
#if BITS
        const char *at = w + scale_bytes;
        /* where these panels end, the next ones begin NP - 1 further on */
        const long ahead = AHEAD * group_bytes + (g + AHEAD < groups ? 0 : (NP - 1) * panel_bytes);
#endif
        for (long k = 0; k < pairs; k += PAIRS) {
            UNROLL for (int p = 0; p < NP; p++) {
#if BITS
                const char *from = at + p * panel_bytes + k / PAIRS * NR * 4;
                UNROLL for (int line = 0; line < NR * 4; line += 64) __builtin_prefetch(from + ahead + line);
                vu words[NV];
                UNROLL for (int v = 0; v < NV; v++) words[v] = *(const vu_mem *)(from + v * VL * 4);
#endif
                UNROLL for (int i = 0; i < PAIRS; i++) {
                    vf b[NV];
#if BITS
                    UNROLL for (int v = 0; v < NV; v++) b[v] = integer_pairs(words[v], i, BITS);
#else
                    UNROLL for (int v = 0; v < NV; v++) b[v] = vload(unpacked + (k + i) * NR + v * VL);
#endif
                    UNROLL for (int r = 0; r < ROWS; r++) {
                        const vf a = (vf)((vu){0} + x[r * ldx + k + i]);
                        UNROLL for (int v = 0; v < NV; v++) part[r][p * NV + v] = dot(part[r][p * NV + v], a, b[v]);
                    }
                }
            }
        }
#if !BITS
        unpacked += pairs * NR;
#endif
        UNROLL for (int p = 0; p < NP; p++) UNROLL for (int v = 0; v < NV; v++) {
            const uint16_t *half = (const uint16_t *)(w + p * panel_bytes) + v * VL;
            float *to = acc + p * NR + v * VL;
            const vf scale = vload_half(half);
            if (bits == 4) {
                const vf offset = vload_half(half + NR);
                UNROLL for (int r = 0; r < ROWS; r++, to += NP * NR)
                    vstore(to, vload(to) + scale * part[r][p * NV + v] + offset * vset(sums[r * stride + g]));
            } else UNROLL for (int r = 0; r < ROWS; r++, to += NP * NR)
                vstore(to, vload(to) + scale * part[r][p * NV + v]);
        }
    }
}
#undef BITS
#undef PAIRS
