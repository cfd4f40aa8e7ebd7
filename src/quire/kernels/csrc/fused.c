/* Small operations between GEMMs, each in one pass over float or bfloat16, computed in float.
 *
 * Rows are independent, and the order of operations of a row does not depend on its thread.
 */
#define ALL_LANES
#include "activations.h"
#include "heads.h"
#include "cache_dtype.h"

#define COLUMNS 512 /* columns per task of an elementwise operation */

/* Structures have the same fields in the same order as in cpu/ops.py. All tensors of a job except the cache and the ids have one
 * dtype. */

typedef struct {
    void *out;
    const int64_t *ids;
    const void *table;
    int64_t num_rows, row_bytes;
} EmbedJob;

void quire_embed(const EmbedJob *job)
{
#pragma omp for schedule(static)
    for (int64_t row = 0; row < job->num_rows; row++)
        memcpy((char *)job->out + row * job->row_bytes, (const char *)job->table + job->ids[row] * job->row_bytes,
               (size_t)job->row_bytes);
}

typedef struct {
    void *out; /* may be x */
    const void *x, *weight, *bias; /* bias has the dtype of the weight, or is NULL */
    void *residual;                /* or NULL */
    int64_t num_rows, size, stride, out_stride, centred, bf16, weight_bf16;
    double eps;
} NormJob;

/* LANES values minus `mean`, zeros after the last. */
INLINE vf take_from(const void *from, int bf16, long at, long left, float mean)
{
    vf x = take(from, bf16, at, left) - mean;
    for (long i = left; i < LANES; i++)
        x[i] = 0;
    return x;
}

INLINE void centre_row(const NormJob *job, const void *from, long from_at, long into_at, int bf16, int weight_bf16)
{
    vf sum = {0}, squares = {0};
    long size = job->size;
    for (long i = 0; i < size; i += LANES)
        sum += take(from, bf16, from_at + i, size - i);
    float mean = lanes_sum(sum) / (float)size;
    for (long i = 0; i < size; i += LANES) {
        vf x = take_from(from, bf16, from_at + i, size - i, mean);
        squares = fused(x, x, squares);
    }
    float factor = 1.0f / sqrtf(lanes_sum(squares) / (float)size + (float)job->eps);
    for (long i = 0; i < size; i += LANES) {
        vf x = (take(from, bf16, from_at + i, size - i) - mean) * factor;
        vf bias = job->bias ? take(job->bias, weight_bf16, i, size - i) : splat(0);
        put(job->out, bf16, into_at + i, size - i, fused(x, take(job->weight, weight_bf16, i, size - i), bias));
    }
}

INLINE void norm(const NormJob *job, int bf16, int weight_bf16)
{
    long size = job->size;
#pragma omp for schedule(static)
    for (long row = 0; row < job->num_rows; row++) {
        const void *from = job->residual ? job->residual : job->x;
        long at = row * job->stride, from_at = job->residual ? row * size : at;
        if (job->residual)
            for (long i = 0; i < size; i += LANES) {
                vf x = take(job->x, bf16, at + i, size - i), sum = take(job->residual, bf16, from_at + i, size - i);
                put(job->residual, bf16, from_at + i, size - i, sum + x);
            }
        if (job->centred)
            centre_row(job, from, from_at, row * job->out_stride, bf16, weight_bf16);
        else
            norm_row(from, from_at, job->weight, weight_bf16, job->out, row * job->out_stride, size, (float)job->eps, bf16);
    }
}

void quire_norm(const NormJob *job)
{
    if (job->bf16 && job->weight_bf16)
        norm(job, 1, 1);
    else if (job->bf16)
        norm(job, 1, 0);
    else
        norm(job, 0, 0);
}

typedef struct {
    void *out;
    const void *x; /* gated: gate and up, concatenated */
    int64_t num_rows, size, stride, activation, gated, bf16;
    double bound; /* or 0 */
} ActivateJob;

INLINE void activate_rows(const ActivateJob *job, int bf16)
{
    long pieces = (job->size + COLUMNS - 1) / COLUMNS;
    const void *up = job->gated ? job->x : NULL;
#pragma omp for schedule(static)
    for (long task = 0; task < job->num_rows * pieces; task++) {
        long row = quotient(task, pieces), i = (task - row * pieces) * COLUMNS, left = job->size - i, at = row * job->stride + i;
        activate((int)job->activation, (float)job->bound, job->x, at, up, at + job->size, job->out, row * job->size + i,
                 left < COLUMNS ? left : COLUMNS, bf16);
    }
}

void quire_activate(const ActivateJob *job)
{
    if (job->bf16)
        activate_rows(job, 1);
    else
        activate_rows(job, 0);
}

/* Equal to the numbers in cpu/ops.py. */
enum { SCALE, SOFTCAP, ADD, WEIGH, WEIGH_ROWS, SCALE_ROWS, SCALE_COLUMNS };

typedef struct {
    void *x;
    const void *other; /* operand: of the shape of x, one value per row, a float factor per row, or one row of factors for
                          * all */
    int64_t num_rows, size, stride, other_stride, change, bf16;
    double by;
} ChangeJob;

INLINE vf sigmoid(vf x) { return 1.0f / (exp_lanes(smaller(splat(88.0f), -x)) + 1.0f); }

INLINE void change_rows(const ChangeJob *job, int change, int bf16)
{
    long pieces = (job->size + COLUMNS - 1) / COLUMNS;
    float by = (float)job->by;
#pragma omp for schedule(static)
    for (long task = 0; task < job->num_rows * pieces; task++) {
        long row = quotient(task, pieces), start = (task - row * pieces) * COLUMNS, other_at = row * job->other_stride;
        long end = start + COLUMNS < job->size ? start + COLUMNS : job->size;
        vf other = splat(0);
        if (change == WEIGH_ROWS)
            other = splat(take(job->other, bf16, other_at, 1)[0]);
        if (change == SCALE_ROWS)
            other = splat(((const float *)job->other)[other_at]);
        for (long i = start; i < end; i += LANES) {
            vf x = take(job->x, bf16, row * job->stride + i, end - i);
            if (change == ADD || change == WEIGH || change == SCALE_COLUMNS)
                other = take(job->other, bf16, other_at + i, end - i);
            switch (change) {
            case SCALE: x = x * by; break;
            case SOFTCAP: x = by - 2.0f * by / (exp_lanes(smaller(splat(44.0f), x / by) * 2.0f) + 1.0f); break;
            case ADD: x = x + other; break;
            case SCALE_ROWS:
            case SCALE_COLUMNS: x = x * other; break;
            default: x = x * rounded(sigmoid(other), bf16);
            }
            put(job->x, bf16, row * job->stride + i, end - i, x);
        }
    }
}

void quire_change(const ChangeJob *job)
{
    if (job->bf16)
        change_rows(job, (int)job->change, 1);
    else
        change_rows(job, (int)job->change, 0);
}

typedef struct {
    void *out; /* [tokens, heads, head_dim] */
    const void *qkv, *table, *q_norm, *k_norm; /* norms may be NULL */
    const int64_t *positions, *slots;
    void *k_cache, *v_cache;
    int64_t num_tokens, stride, heads, kv_heads, head_dim, slot_stride, rotary_dim, bf16, kept, norm_bf16; /* kept: a cache dtype */
    double eps, k_scale, v_scale;
} RotateJob;

INLINE void rotate_and_write(const RotateJob *job, int bf16)
{
    long heads = job->heads, kv_heads = job->kv_heads, all = heads + 2 * kv_heads, dim = job->head_dim;
    long step = head_step((int)job->kept, dim);
#pragma omp for schedule(static)
    for (long task = 0; task < job->num_tokens * all; task++) {
        long token = quotient(task, all), head = task - token * all, slot = job->slots[token];
        if (head >= heads && slot < 0)
            continue;
        float x[MAX_HEAD_DIM];
        long from = token * job->stride + head * dim;
        const void *weight = head < heads ? job->q_norm : job->k_norm;
        if (weight && head < heads + kv_heads) {
            uint16_t narrow_x[MAX_HEAD_DIM];
            void *into = bf16 ? (void *)narrow_x : (void *)x;
            norm_row(job->qkv, from, weight, (int)job->norm_bf16, into, 0, dim, (float)job->eps, bf16);
            if (bf16)
                widen(narrow_x, 1, 0, dim, 1.0f, x);
        } else
            widen(job->qkv, bf16, from, dim, 1.0f, x);
        if (head < heads + kv_heads)
            turn(x, job->table, job->positions[token] * job->rotary_dim, job->rotary_dim / 2, bf16);
        if (head < heads)
            narrow(x, job->out, bf16, (token * heads + head) * dim, dim);
        else if (head < heads + kv_heads)
            narrow_kept(x, job->k_cache, (int)job->kept, slot * job->slot_stride + (head - heads) * step, dim, (float)job->k_scale,
                        bf16);
        else
            narrow_kept(x, job->v_cache, (int)job->kept, slot * job->slot_stride + (head - heads - kv_heads) * step, dim,
                        (float)job->v_scale, bf16);
    }
}

void quire_rotate_and_write(const RotateJob *job)
{
    if (job->bf16)
        rotate_and_write(job, 1);
    else
        rotate_and_write(job, 0);
}
