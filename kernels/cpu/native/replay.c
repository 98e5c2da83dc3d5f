/* A recorded step: kernel calls one after another, without the interpreter between them.
 *
 * the arguments of call c are in c.a, in the order of the kernel's own; kernels/cpu/recorded_steps.py writes them.
 */
#include <stdint.h>
#include "pool.h"

typedef union {
    void *p;
    int64_t i;
    double f;
} argument;

typedef struct {
    int64_t kernel;
    argument a[26];
} recorded_call;

enum { EMBED, LINEAR, RMS_NORM, ROPE, GATE, ATTENTION, QUANT_LINEAR, WIDEN, CHOOSE, EXPERTS, PLACE };

void kr_embed(int, const int64_t *, const void *, void *, long, long, float);
void kr_linear(pool *, int, const void *, long, void *, const void *, const float *, long, long, long);
void kr_quant_linear(pool *, int, int, const void *, long, void *, const void *, const float *, long, long, long, long,
                     float);
void kr_rms_norm(pool *, int, int, const void *, void *, void *, const void *, long, long, long, long, long, float);
void kr_rope(pool *, int, void *, void *, const float *, const int64_t *, long, long, long, long, long, long, long, long);
void kr_gate(pool *, int, int, const void *, void *, long, long, long);
void kr_attention(pool *, int, const void *, void *, const void *, const int32_t *, const int32_t *, const int32_t *,
                  long, const int32_t *, long, long, long, long, long, long, long, long, long, long, float, float, int,
                  long, long, int32_t *);
void kr_widen(pool *, const void *, float *, long);
void kr_choose(pool *, const float *, const float *, float *, int64_t *, long, long, long, int, long, long, int, float);
void kr_experts(pool *, int, int, int, const void *, long, const float *, const int64_t *, const void *const *,
                const void *const *, const float *, const void *, const float *, void *, long, long, long, long, long, long);
void kr_norm_rope_store(pool *, int, int, int, void *, void *, const void *, const void *, const void *, const float *,
              const int64_t *, const int64_t *, char *, long, long, long, long, long, long, long, long, long, long, float);

static void call(int64_t kernel, const argument *a)
{
    switch (kernel) {
    case EMBED: kr_embed(a[0].i, a[1].p, a[2].p, a[3].p, a[4].i, a[5].i, a[6].f); break;
    case LINEAR:
        kr_linear(a[0].p, a[1].i, a[2].p, a[3].i, a[4].p, a[5].p, a[6].p, a[7].i, a[8].i, a[9].i);
        break;
    case RMS_NORM:
        kr_rms_norm(a[0].p, a[1].i, a[2].i, a[3].p, a[4].p, a[5].p, a[6].p, a[7].i, a[8].i, a[9].i, a[10].i, a[11].i,
                    a[12].f);
        break;
    case ROPE:
        kr_rope(a[0].p, a[1].i, a[2].p, a[3].p, a[4].p, a[5].p, a[6].i, a[7].i, a[8].i, a[9].i, a[10].i, a[11].i,
                a[12].i, a[13].i);
        break;
    case GATE: kr_gate(a[0].p, a[1].i, a[2].i, a[3].p, a[4].p, a[5].i, a[6].i, a[7].i); break;
    case ATTENTION:
        kr_attention(a[0].p, a[1].i, a[2].p, a[3].p, a[4].p, a[5].p, a[6].p, a[7].p, a[8].i, a[9].p, a[10].i, a[11].i,
                     a[12].i, a[13].i, a[14].i, a[15].i, a[16].i, a[17].i, a[18].i, a[19].i, a[20].f, a[21].f, a[22].i,
                     a[23].i, a[24].i, a[25].p);
        break;
    case QUANT_LINEAR:
        kr_quant_linear(a[0].p, a[1].i, a[2].i, a[3].p, a[4].i, a[5].p, a[6].p, a[7].p, a[8].i, a[9].i, a[10].i, a[11].i,
                        a[12].f);
        break;
    case WIDEN: kr_widen(a[0].p, a[1].p, a[2].p, a[3].i); break;
    case CHOOSE:
        kr_choose(a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].i, a[6].i, a[7].i, a[8].i, a[9].i, a[10].i, a[11].i,
                  a[12].f);
        break;
    case EXPERTS:
        kr_experts(a[0].p, a[1].i, a[2].i, a[3].i, a[4].p, a[5].i, a[6].p, a[7].p, a[8].p, a[9].p, a[10].p, a[11].p,
                   a[12].p, a[13].p, a[14].i, a[15].i, a[16].i, a[17].i, a[18].i, a[19].i);
        break;
    case PLACE:
        kr_norm_rope_store(a[0].p, a[1].i, a[2].i, a[3].i, a[4].p, a[5].p, a[6].p, a[7].p, a[8].p, a[9].p, a[10].p, a[11].p, a[12].p,
                 a[13].i, a[14].i, a[15].i, a[16].i, a[17].i, a[18].i, a[19].i, a[20].i, a[21].i, a[22].i, a[23].f);
        break;
    }
}

void kr_replay(const recorded_call *calls, long count)
{
    for (long i = 0; i < count; i++) call(calls[i].kernel, calls[i].a);
}
