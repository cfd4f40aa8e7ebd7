/* LoRA adapters of many requests in one batch: a row of x is shrunk to ranks, which are expanded to outputs. */
#include "lora.h"

#include "simd_wide.h"

#define RANKS 16    /* ranks per task */
#define OUTPUTS 256 /* outputs per task */
#define SOME 64     /* outputs per iteration; whole vectors */
#define MAX_RANK 512

/* Structures have the same fields in the same order as in cpu/ops.py. */

typedef struct {
    void *out;               /* NULL: only compute ranks */
    const void *x;           /* NULL: the ranks are the rows `ids` of a, or without ids the input `ranks` */
    const void *a, *b;       /* [slots][parts * rank, size_in], [slots][sum of part_sizes, rank] */
    const int32_t *tokens;   /* the slot of each token, or -1 */
    const int64_t *part_ends; /* end of the outputs of each part */
    const int64_t *ids;
    float *ranks; /* [tokens, parts * rank] */
    int64_t num_tokens, num_parts, rank, size_in, x_stride, out_stride, a_stride, b_stride, bf16, own_bf16;
} LoraJob;

INLINE Numbers from(Numbers x, long ahead) { return (Numbers){x.at, x.start + ahead, x.bf16}; }

INLINE wide take_wide(Numbers x, int bf16, long at)
{
    at += x.start;
    return bf16 ? wide_bf16((const uint16_t *)x.at + at) : wide_load((const float *)x.at + at);
}

INLINE float take_one(Numbers x, long at)
{
    at += x.start;
    return x.bf16 ? from_bf16(((const uint16_t *)x.at)[at]) : ((const float *)x.at)[at];
}

INLINE void times_four(Numbers x, Numbers a, long size, int x_bf16, int a_bf16, float *into)
{
    wide sums[4] = {{0}}, others[4] = {{0}};
    long k = 0;
    for (; k + 2 * WIDE <= size; k += 2 * WIDE) {
        wide left = take_wide(x, x_bf16, k), right = take_wide(x, x_bf16, k + WIDE);
        for (int i = 0; i < 4; i++) {
            sums[i] = wide_fused(left, take_wide(a, a_bf16, i * size + k), sums[i]);
            others[i] = wide_fused(right, take_wide(a, a_bf16, i * size + k + WIDE), others[i]);
        }
    }
    for (; k + WIDE <= size; k += WIDE)
        for (int i = 0; i < 4; i++)
            sums[i] = wide_fused(take_wide(x, x_bf16, k), take_wide(a, a_bf16, i * size + k), sums[i]);
    for (int i = 0; i < 4; i++)
        sums[i] += others[i];
    wide_sum4(sums, into);
    for (; k < size; k++)
        for (int i = 0; i < 4; i++)
            into[i] += take_one(x, k) * take_one(a, i * size + k);
}

static float times_one(Numbers x, Numbers a, long size)
{
    vf sum = {0};
    for (long k = 0; k < size; k += LANES)
        sum = fused(take(x.at, x.bf16, x.start + k, size - k), take(a.at, a.bf16, a.start + k, size - k), sum);
    return lanes_sum(sum);
}

void quire_lora_shrink(Numbers x, Numbers a, long size, long first, long end, float *ranks)
{
    long j = first;
    for (; j + 4 <= end; j += 4) {
        Numbers four = from(a, j * size);
        if (x.bf16 && a.bf16)
            times_four(x, four, size, 1, 1, ranks + j);
        else if (x.bf16)
            times_four(x, four, size, 1, 0, ranks + j);
        else if (a.bf16)
            times_four(x, four, size, 0, 1, ranks + j);
        else
            times_four(x, four, size, 0, 0, ranks + j);
    }
    for (; j < end; j++)
        ranks[j] = times_one(x, from(a, j * size), size);
}

/* Add up to SOME LoRA outputs to `out`. */
INLINE void expand(const float *ranks, Numbers b, long rank, long count, void *out, int out_bf16, long out_at, int bf16)
{
    float found[SOME];
    long i = 0, whole = rank % LANES ? 0 : count / 4 * 4;
    for (; i < whole; i += 4) {
        vf sums[4] = {{0}};
        for (long j = 0; j < rank; j += LANES)
            for (int n = 0; n < 4; n++)
                sums[n] = fused(load(ranks + j), take(b.at, bf16, b.start + (i + n) * rank + j, LANES), sums[n]);
        lanes_sum4(sums, found + i);
    }
    for (; i < count; i++)
        found[i] = times_one((Numbers){ranks, 0, 0}, from(b, i * rank), rank);
    for (i = 0; i < count; i += LANES)
        put(out, out_bf16, out_at + i, count - i, take(out, out_bf16, out_at + i, count - i) + load(found + i));
}

void quire_lora_expand(const float *ranks, Numbers b, long rank, long first, long end, void *out, int out_bf16, long out_at)
{
    for (long i = first; i < end; i += SOME) {
        long count = end - i < SOME ? end - i : SOME;
        if (b.bf16)
            expand(ranks, from(b, i * rank), rank, count, out, out_bf16, out_at + i, 1);
        else
            expand(ranks, from(b, i * rank), rank, count, out, out_bf16, out_at + i, 0);
    }
}

static void shrink_rows(const LoraJob *job)
{
    long all = job->num_parts * job->rank, pieces = (all + RANKS - 1) / RANKS;
#pragma omp for schedule(monotonic : dynamic, 4)
    for (long task = 0; task < job->num_tokens * pieces; task++) {
        long token = task / pieces, first = task % pieces * RANKS, slot = job->tokens[token];
        Numbers x = {job->x, token * job->x_stride, (int)job->bf16};
        Numbers a = {job->a, slot * job->a_stride, (int)job->own_bf16};
        if (slot >= 0)
            quire_lora_shrink(x, a, job->size_in, first, first + RANKS < all ? first + RANKS : all, job->ranks + token * all);
    }
}

/* Return the ranks of a token of an embedding layer: a row of `a`, converted to float. */
static const float *look_up(const LoraJob *job, long token, long slot, float *into)
{
    widen(job->a, (int)job->own_bf16, slot * job->a_stride + job->ids[token] * job->rank, job->rank, 1, into);
    return into;
}

void quire_lora(const LoraJob *job)
{
    long rank = job->rank, parts = job->num_parts, pieces;
    if (job->x)
        shrink_rows(job);
    if (!job->out)
        return;
    pieces = (job->part_ends[parts - 1] + OUTPUTS - 1) / OUTPUTS;
#pragma omp for schedule(monotonic : dynamic, 4)
    for (long task = 0; task < job->num_tokens * pieces; task++) {
        long token = task / pieces, first = task % pieces * OUTPUTS, last = first + OUTPUTS, slot = job->tokens[token];
        float looked_up[MAX_RANK];
        if (slot < 0)
            continue;
        const float *ranks = job->ids ? look_up(job, token, slot, looked_up) : job->ranks + token * parts * rank;
        Numbers b = {job->b, slot * job->b_stride, (int)job->own_bf16};
        for (long part = 0, start = 0; part < parts; start = job->part_ends[part++]) {
            long from = first > start ? first : start, end = last < job->part_ends[part] ? last : job->part_ends[part];
            if (from < end)
                quire_lora_expand(ranks + part * rank, b, rank, from, end, job->out, (int)job->bf16, token * job->out_stride);
        }
    }
}
