/* MLA without the attention itself: cache writes, and the projections of each head to the latent space and back. */
#include <omp.h>

#define ALL_LANES
#include "heads.h"
#include "cache_dtype.h"
#include "matrix.h"

#define MAX_RANK 4096 /* equal to that in reference/mla.py */
#define STRIP 8      /* vectors of columns per iteration for one row of x */
#define TASK_ROWS 64 /* rows of x per task; equal to that in reference/mla.py */
#define TASK_COLUMNS (STRIP * LANES)
#define TASK_OUTPUTS 32
/* Sums stay in registers only if all loops over them are unrolled. */
#define UNROLL _Pragma("GCC unroll 8")

/* Structures have the same fields in the same order as in reference/mla.py. All tensors of a job but the cache have one dtype. */

typedef struct {
    void *q;               /* rotated in place from `nope_dim` on */
    const void *kv, *norm; /* kv: latent, then key */
    const void *table;
    const int64_t *positions, *slots;
    void *cache; /* [slots, rank + rope_dim] */
    int64_t num_tokens, q_stride, kv_stride, heads, nope_dim, rope_dim, rank, neighbours, bf16, kept; /* kept: a cache dtype */
    double eps, scale;
} EnterJob;

/* Rotate the pairs of elements 2i and 2i + 1 of a head. */
INLINE void turn_pairs(float *head, const void *table, long at, long half, int bf16)
{
    float angles[MAX_HEAD_DIM];
    widen(table, bf16, at, 2 * half, 1.0f, angles);
    for (long i = 0; i < half; i++) {
        float left = head[2 * i], right = head[2 * i + 1], cosine = angles[i], sine = angles[half + i];
        head[2 * i] = left * cosine - right * sine;
        head[2 * i + 1] = right * cosine + left * sine;
    }
}

INLINE void turned(const EnterJob *job, long token, const void *from, long from_at, void *into, int kind, long into_at, int bf16)
{
    float head[MAX_HEAD_DIM];
    long dim = job->rope_dim, at = job->positions[token] * dim;
    widen(from, bf16, from_at, dim, 1.0f, head);
    if (job->neighbours)
        turn_pairs(head, job->table, at, dim / 2, bf16);
    else
        turn(head, job->table, at, dim / 2, bf16);
    narrow_kept(head, into, kind, into_at, dim, (float)job->scale, bf16);
}

/* Write the norm of a latent to a cache of another dtype. */
INLINE void norm_kept(const EnterJob *job, long from, long into, int bf16)
{
    float wide[MAX_RANK];
    uint16_t halves[MAX_RANK];
    norm_row(job->kv, from, job->norm, bf16, bf16 ? (void *)halves : (void *)wide, 0, job->rank, (float)job->eps, bf16);
    if (bf16)
        widen(halves, 1, 0, job->rank, 1.0f, wide);
    narrow_kept(wide, job->cache, (int)job->kept, into, job->rank, (float)job->scale, bf16);
}

INLINE void enter(const EnterJob *job, int bf16)
{
    long all = job->heads + 1, rank = job->rank, query_dim = job->nope_dim + job->rope_dim;
#pragma omp for schedule(static)
    for (long task = 0; task < job->num_tokens * all; task++) {
        long token = task / all, head = task % all, slot = job->slots[token];
        if (head < job->heads) {
            long at = token * job->q_stride + head * query_dim + job->nope_dim;
            turned(job, token, job->q, at, job->q, bf16, at, bf16);
        } else if (slot >= 0) {
            long from = token * job->kv_stride, into = slot * (rank + job->rope_dim);
            int kind = (int)job->kept;
            if (kind == bf16)
                norm_row(job->kv, from, job->norm, bf16, job->cache, into, rank, (float)job->eps, bf16);
            else
                norm_kept(job, from, into, bf16);
            turned(job, token, job->kv, from + rank, job->cache, kind, into + rank, bf16);
        }
    }
}

void quire_latent_enter(const EnterJob *job)
{
    if (job->bf16)
        enter(job, 1);
    else
        enter(job, 0);
}

/* The weight is [heads, nope_dim + v_dim, rank]. */
typedef struct {
    void *out;
    const void *x, *weight;
    uint8_t *scratch; /* for release: TASK_ROWS rows per thread */
    int64_t num_tokens, x_stride, heads, nope_dim, rope_dim, v_dim, rank, bf16, scratch_bytes;
} HeadsJob;

INLINE float number(const void *from, int bf16, long at)
{
    return bf16 ? from_bf16(((const uint16_t *)from)[at]) : ((const float *)from)[at];
}

/* `count` rows of x times columns [start, start + left) of the weight, in `vecs` vectors. Every output is summed over the rows of
 * the weight in order. */
INLINE void times_strip(int count, int vecs, const HeadsJob *job, long row, long head, long start, long left, int bf16)
{
    vf sum[4][STRIP], w[STRIP];
    long rank = job->rank, x_at[4], query_dim = job->nope_dim + job->rope_dim;
    long w_at = head * (job->nope_dim + job->v_dim) * rank + start;
    UNROLL
    for (int r = 0; r < count; r++) {
        x_at[r] = (row + r) * job->x_stride + head * query_dim;
        UNROLL
        for (int v = 0; v < vecs; v++)
            sum[r][v] = (vf){0};
    }
    for (long k = 0; k < job->nope_dim; k++, w_at += rank) {
        UNROLL
        for (int v = 0; v < vecs; v++)
            w[v] = take(job->weight, bf16, w_at + v * LANES, left - v * LANES);
        UNROLL
        for (int r = 0; r < count; r++) {
            vf x = splat(number(job->x, bf16, x_at[r] + k));
            UNROLL
            for (int v = 0; v < vecs; v++)
                sum[r][v] = fused(x, w[v], sum[r][v]);
        }
    }
    UNROLL
    for (int r = 0; r < count; r++) {
        long at = ((row + r) * job->heads + head) * (rank + job->rope_dim) + start;
        UNROLL
        for (int v = 0; v < vecs; v++)
            put(job->out, bf16, at + v * LANES, left - v * LANES, sum[r][v]);
    }
}

INLINE void times_strips(int count, int vecs, const HeadsJob *job, long row, long head, long start, long end, int bf16)
{
    long whole = vecs * LANES;
    for (; start + whole <= end; start += whole)
        times_strip(count, vecs, job, row, head, start, whole, bf16);
    for (; start < end; start += LANES)
        times_strip(count, 1, job, row, head, start, end - start, bf16);
}

INLINE void absorb(const HeadsJob *job, int bf16)
{
    long pieces = (job->rank + TASK_COLUMNS - 1) / TASK_COLUMNS, blocks = (job->num_tokens + TASK_ROWS - 1) / TASK_ROWS;
    long size = bf16 ? 2 : 4, query_dim = job->nope_dim + job->rope_dim, width = job->rank + job->rope_dim;
#pragma omp for schedule(dynamic, 1)
    for (long task = 0; task < job->heads * pieces * blocks; task++) {
        long row = task % blocks * TASK_ROWS, start = task / blocks % pieces * TASK_COLUMNS, head = task / blocks / pieces;
        long row_end = at_most(row + TASK_ROWS, job->num_tokens), end = at_most(start + TASK_COLUMNS, job->rank);
        for (long r = row; !start && r < row_end; r++) /* copy the rotated part */
            memcpy((char *)job->out + ((r * job->heads + head) * width + job->rank) * size,
                   (const char *)job->x + (r * job->x_stride + head * query_dim + job->nope_dim) * size,
                   (size_t)(job->rope_dim * size));
        for (; row + 4 <= row_end; row += 4)
            times_strips(4, LANES == 8 ? STRIP / 4 : STRIP / 2, job, row, head, start, end, bf16);
        for (; row + 2 <= row_end; row += 2)
            times_strips(2, STRIP / 2, job, row, head, start, end, bf16);
        for (; row < row_end; row++)
            times_strips(1, STRIP, job, row, head, start, end, bf16);
    }
}

/* Project queries to the latent space: [tokens, heads, nope_dim + rope_dim] -> [tokens, heads, rank + rope_dim]. */
void quire_latent_absorb(const HeadsJob *job)
{
    if (job->bf16)
        absorb(job, 1);
    else
        absorb(job, 0);
}

static void release_task(const HeadsJob *job, uint8_t *scratch, long head, long row, long start)
{
    long size = job->bf16 ? 2 : 4, width = job->rank + job->rope_dim;
    long first = head * (job->nope_dim + job->v_dim) + job->nope_dim + start;
    Matrix weight = {.data = (const char *)job->weight + first * job->rank * size, .form = job->bf16 ? BF16 : F32};
    weight.rows = at_most(TASK_OUTPUTS, job->v_dim - start), weight.columns = job->rank, weight.row_bytes = job->rank * size;
    LinearJob product = {.parts = &weight, .num_parts = 1, .x_bf16 = job->bf16, .out_bf16 = job->bf16};
    product.num_rows = at_most(TASK_ROWS, job->num_tokens - row);
    product.x = (const char *)job->x + (row * job->x_stride + head * width) * size, product.x_stride = job->x_stride;
    product.out = (char *)job->out + ((row * job->heads + head) * job->v_dim + start) * size;
    product.out_stride = job->heads * job->v_dim;
    for (long r = 0; r < quire_linear_rows(&product); r++)
        quire_linear_prepare(&product, r, scratch);
    for (long task = 0; task < quire_linear_tasks(&product); task++)
        quire_linear_task(&product, scratch, task);
}

/* Project attention outputs to values: [tokens, heads, rank + rope_dim] -> [tokens, heads, v_dim]. */
void quire_latent_release(const HeadsJob *job)
{
    long pieces = (job->v_dim + TASK_OUTPUTS - 1) / TASK_OUTPUTS, blocks = (job->num_tokens + TASK_ROWS - 1) / TASK_ROWS;
    uint8_t *scratch = job->scratch + omp_get_thread_num() * job->scratch_bytes;
#pragma omp for schedule(dynamic, 1)
    for (long task = 0; task < job->heads * pieces * blocks; task++)
        release_task(job, scratch, task / blocks / pieces, task % blocks * TASK_ROWS, task / blocks % pieces * TASK_OUTPUTS);
}
