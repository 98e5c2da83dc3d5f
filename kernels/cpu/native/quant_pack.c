/* Finds scale, offset and integers of every group of a weight, and lays them into panels; quant.h describes the format.
 *
 * bits 8: the largest magnitude becomes 127. bits 4: of several fits the one with the smallest squared error: least to
 * largest value; the value of the largest magnitude at 0 and zero at 8; and twice a least-squares refit of the better.
 * Values that were such integers before (GGUF's Q4_0, Q4_1, Q8_0, in groups that match) are reproduced exactly.
 */
#include <string.h>
#include "pool.h"
#include "quant.h"

#define MOST 128 /* inputs in a group */

typedef struct {
    int bits, wide;
    const void *source;
    char *target;
    double *errors; /* [panels][2]: sums of squared errors and of squares */
    long N, K, group, groups;
    float unit;
} quantize_job;

typedef struct {
    uint16_t scale, offset;
    double error;
    float q[MOST];
} fit;

INLINE vf rounded(vf x) { return (x + 12582912.0f) - 12582912.0f; } /* |x| < 2^22 */
INLINE vf clamped(vf x, float low, float high) { return -vmax(-vmax(x, vset(low)), vset(-high)); }

/* The integers for this scale and offset, and their squared error; kept when that is smaller than the best so far. */
static void try_fit(fit *best, const float *v, long n, float scale, float offset, float low, float high)
{
    fit f;
    f.scale = to_half(scale);
    f.offset = to_half(offset);
    const float s = from_half(f.scale), o = from_half(f.offset), inverse = s == 0.0f ? 0.0f : 1.0f / s;
    vf error = {0};
    for (long k = 0; k < n; k += VL) {
        vf value = vload(v + k), q = rounded(clamped((value - o) * inverse, low, high)), off = q * s + o - value;
        vstore(f.q + k, q);
        error += off * off;
    }
    f.error = vsum(error);
    if (f.error < best->error) *best = f;
}

/* Scale and offset that suit the best fit's integers best: linear regression of v on q. */
static void refit(fit *best, const float *v, long n)
{
    vf q1 = {0}, q2 = {0}, v1 = {0}, qv = {0};
    for (long k = 0; k < n; k += VL) {
        vf q = vload(best->q + k), value = vload(v + k);
        q1 += q;
        q2 += q * q;
        v1 += value;
        qv += q * value;
    }
    const double mean_q = vsum(q1) / (double)n, mean_v = vsum(v1) / (double)n;
    const double spread = vsum(q2) - n * mean_q * mean_q;
    if (spread < 0.5) return; /* all integers are equal */
    const double scale = (vsum(qv) - n * mean_q * mean_v) / spread;
    try_fit(best, v, n, (float)scale, (float)(mean_v - scale * mean_q), 0.0f, 15.0f);
}

/* v: n values in multiples of the unit, n a multiple of VL. */
static void fit_group(fit *best, const float *v, long n, int bits)
{
    vf low = vload(v), high = low, square = {0};
    for (long k = 0; k < n; k += VL) {
        vf value = vload(v + k);
        high = vmax(high, value);
        low = -vmax(-low, -value);
        square += value * value;
    }
    const float most = vmaximum(high), least = -vmaximum(-low), extreme = -least > most ? least : most;
    best->error = INFINITY;
    if (bits == 8) {
        try_fit(best, v, n, fabsf(extreme) / 127.0f, 0.0f, -127.0f, 127.0f);
        return;
    }
    const double enough = 1e-12 * vsum(square);
    try_fit(best, v, n, (most - least) / 15.0f, least, 0.0f, 15.0f);
    if (best->error > enough) try_fit(best, v, n, extreme / -8.0f, extreme, 0.0f, 15.0f);
    for (int i = 0; i < 2 && best->error > enough; i++) refit(best, v, n);
}

static void place(const fit *f, char *at, long i, long group, int bits)
{
    uint16_t *halves = (uint16_t *)at;
    halves[i] = f->scale;
    if (bits == 4) halves[NR + i] = f->offset;
    char *words = at + quant_scale_bytes(bits);
    const long per = 32 / bits;
    for (long k = 0; k < group; k += per) {
        uint32_t word = 0;
        for (long n = 0; n < per; n++) word |= (uint32_t)(f->q[k + n] + (bits == 8 ? 128.0f : 0.0f)) << n * bits;
        memcpy(words + (k / per * NR + i) * 4, &word, 4);
    }
}

static void quantize_task(void *arg, long panel)
{
    const quantize_job *j = arg;
    const long group_bytes = quant_group_bytes(j->bits, j->group);
    char *at = j->target + panel * j->groups * group_bytes;
    const float inverse = 1.0f / j->unit;
    double error = 0, square = 0;
    for (long g = 0; g < j->groups; g++, at += group_bytes)
        for (long i = 0; i < NR; i++) {
            const long n = panel * NR + i, first = g * j->group, last = first + j->group < j->K ? first + j->group : j->K;
            float v[MOST];
            for (long k = first; k < last; k++)
                v[k - first] = n < j->N ? load_any(j->source, n * j->K + k, j->wide) * inverse : 0.0f;
            for (long k = last - first; k < j->group; k++) v[k] = v[0]; /* unused: x is zero there */
            fit best;
            fit_group(&best, v, j->group, j->bits);
            place(&best, at, i, j->group, j->bits);
            const float scale = from_half(best.scale), offset = from_half(best.offset);
            for (long k = 0; k < last - first; k++) {
                const double off = best.q[k] * scale + offset - v[k];
                error += off * off;
                square += (double)v[k] * v[k];
            }
        }
    j->errors[2 * panel] = error;
    j->errors[2 * panel + 1] = square;
}

/* Bytes of a packed weight [N, K]. */
long kr_quantized_bytes(int bits, long N, long K, long group)
{
    return (N + NR - 1) / NR * ((K + group - 1) / group) * quant_group_bytes(bits, group);
}

/* source [N, K] contiguous: floats if `wide`, else bf16. `unit`: a power of two, of which every weight is less than 32768
 * multiples. errors [panels][2]: squared errors of the weights and their squares, summed, in squared units. */
void kr_quantize(pool *p, int bits, int wide, const void *source, void *target, double *errors, long N, long K,
                 long group, float unit)
{
    quantize_job j = {bits, wide, source, target, errors, N, K, group, (K + group - 1) / group, unit};
    pool_run(p, quantize_task, &j, (N + NR - 1) / NR);
}
