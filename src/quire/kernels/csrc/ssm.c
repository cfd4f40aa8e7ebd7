/* Layers with an SSM state of fixed size per sequence: a short convolution, the scans of Mamba and Mamba-2, the gated delta
 * rule, and their gates.
 *
 * Tokens are computed one after the other, which is cheap compared to the GEMMs of the layer. Sequences and heads are
 * independent, and the order of operations does not depend on the thread.
 */
#include <math.h>

#define ALL_LANES
#include "simd.h"

/* Equal to those in cpu/ssm.py. */
#define MAX_KERNEL 8
#define MAX_DIM 512
#define CHANNELS 64 /* channels per task of a convolution or of Mamba's scan */
#define COLUMNS 512 /* columns per task of an elementwise operation */

/* Structures have the same fields in the same order as in cpu/ssm.py. Inputs and outputs have one dtype. */

typedef struct {
    const int32_t *starts, *rows;
    const int64_t *positions;
    int64_t states_per_row; /* sequences with at most this many tokens keep the state after each, longer ones only the last */
} Seqs;

/* The index of a sequence's state after `count` of its tokens in this batch. */
INLINE long state_after(const Seqs *seqs, long seq, long count)
{
    long num_tokens = seqs->positions[seqs->starts[seq]] + count;
    return seqs->rows[seq] * seqs->states_per_row + num_tokens % seqs->states_per_row;
}

/* Pointers to a part of a state before and after a token, which may be equal. */
typedef struct {
    const float *before;
    float *after;
} Part;

/* `count` elements from `from` on of a state of `size` elements, around token `at` of a sequence. */
INLINE Part state_part(float *state, const Seqs *seqs, long seq, long at, long size, long from, long count)
{
    long first = seqs->starts[seq], num_tokens = seqs->starts[seq + 1] - first;
    int keeps_all = num_tokens <= seqs->states_per_row;
    float *after = state + state_after(seqs, seq, keeps_all ? at + 1 : num_tokens) * size + from;
    if (at ? !keeps_all : !seqs->positions[first]) {
        if (!at)
            memset(after, 0, (size_t)count * 4);
        return (Part){after, after};
    }
    return (Part){state + state_after(seqs, seq, at) * size + from, after};
}

INLINE float one(const void *from, int bf16, long at)
{
    return bf16 ? from_bf16(((const uint16_t *)from)[at]) : ((const float *)from)[at];
}

INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

/* 1 / (1 + e^-x) */
INLINE vf sigmoid(vf x) { return 1.0f / (exp_lanes(smaller(splat(88.0f), -x)) + 1.0f); }

typedef struct {
    void *out;
    const void *x, *weight, *bias; /* [channels, kernel]; NULL: no bias */
    void *state;                   /* [states, channels, kernel - 1] */
    Seqs seqs;
    int64_t num_seqs, channels, stride, kernel, activated, bf16;
} ConvJob;

/* `count` channels from `from` on. The last `kernel` inputs are in a ring buffer. */
INLINE void conv_channels(const ConvJob *job, long seq, long from, long count, int bf16)
{
    float seen[MAX_KERNEL][CHANNELS] = {{0}}, weight[MAX_KERNEL][CHANNELS] = {{0}}, bias[CHANNELS] = {0};
    long kernel = job->kernel, first = job->seqs.starts[seq], num_tokens = job->seqs.starts[seq + 1] - first;
    long kept = (state_after(&job->seqs, seq, 0) * job->channels + from) * (kernel - 1);
    int keeps_all = num_tokens <= job->seqs.states_per_row;
    if (job->seqs.positions[first])
        for (long c = 0; c < count; c++)
            for (long i = 0; i < kernel - 1; i++)
                seen[i][c] = one(job->state, bf16, kept + c * (kernel - 1) + i);
    for (long c = 0; c < count; c++)
        for (long i = 0; i < kernel; i++)
            weight[i][c] = one(job->weight, bf16, (from + c) * kernel + i);
    if (job->bias)
        widen(job->bias, bf16, from, count, 1.0f, bias);
    for (long t = 0; t < num_tokens; t++) {
        widen(job->x, bf16, (first + t) * job->stride + from, count, 1.0f, seen[(t + kernel - 1) % kernel]);
        for (long c = 0; c < count; c += LANES) {
            vf sum = load(bias + c);
            for (long i = 0; i < kernel; i++)
                sum = fused(load(weight[i] + c), load(seen[(t + i) % kernel] + c), sum);
            put(job->out, bf16, (first + t) * job->channels + from + c, count - c,
                job->activated ? sum * sigmoid(sum) : sum);
        }
        if (!keeps_all && t < num_tokens - 1)
            continue;
        kept = (state_after(&job->seqs, seq, t + 1) * job->channels + from) * (kernel - 1);
        for (long c = 0; c < count; c++)
            for (long i = 0; i < kernel - 1; i++)
                narrow(&seen[(t + 1 + i) % kernel][c], job->state, bf16, kept + c * (kernel - 1) + i, 1);
    }
}

void quire_state_conv(const ConvJob *job)
{
    long blocks = (job->channels + CHANNELS - 1) / CHANNELS;
#pragma omp for schedule(static)
    for (long task = 0; task < job->num_seqs * blocks; task++) {
        long from = task % blocks * CHANNELS, left = job->channels - from, count = left < CHANNELS ? left : CHANNELS;
        if (job->bf16)
            conv_channels(job, task / blocks, from, count, 1);
        else
            conv_channels(job, task / blocks, from, count, 0);
    }
}

typedef struct {
    void *out;
    const void *xbc, *dt;
    const float *rate, *bias, *skip;
    float *state; /* [states, heads, dim, size] */
    Seqs seqs;
    int64_t num_seqs, heads, groups, dim, size, stride, dt_stride, bf16;
    double least, most; /* bounds of a time step */
} ScanJob;

INLINE void scan_token(const ScanJob *job, Part h, long token, long head, int bf16)
{
    long dim = job->dim, size = job->size, from = token * job->stride;
    float x[MAX_DIM], b[MAX_DIM], c[MAX_DIM], y[MAX_DIM];
    long b_at = from + job->heads * dim + head / (job->heads / job->groups) * size;
    widen(job->xbc, bf16, from + head * dim, dim, 1.0f, x);
    widen(job->xbc, bf16, b_at, size, 1.0f, b);
    widen(job->xbc, bf16, b_at + job->groups * size, size, 1.0f, c);
    float wait = softplus(one(job->dt, bf16, token * job->dt_stride + head) + job->bias[head]);
    wait = wait < (float)job->least ? (float)job->least : wait > (float)job->most ? (float)job->most : wait;
    vf keep = splat(expf(wait * job->rate[head]));
    for (long d = 0; d < dim; d++) {
        vf taken = splat(x[d] * wait), sum = {0};
        for (long n = 0; n < size; n += LANES) {
            vf new = fused(taken, take(b, 0, n, size - n), take(h.before, 0, d * size + n, size - n) * keep);
            put(h.after, 0, d * size + n, size - n, new);
            sum = fused(new, take(c, 0, n, size - n), sum);
        }
        y[d] = lanes_sum(sum) + x[d] * job->skip[head];
    }
    narrow(y, job->out, bf16, (token * job->heads + head) * dim, dim);
}

void quire_state_scan(const ScanJob *job)
{
    long held = job->dim * job->size;
#pragma omp for schedule(static)
    for (long task = 0; task < job->num_seqs * job->heads; task++) {
        long seq = task / job->heads, head = task % job->heads;
        long first = job->seqs.starts[seq], end = job->seqs.starts[seq + 1];
        for (long token = first; token < end; token++) {
            Part h = state_part(job->state, &job->seqs, seq, token - first, job->heads * held, head * held, held);
            if (job->bf16)
                scan_token(job, h, token, head, 1);
            else
                scan_token(job, h, token, head, 0);
        }
    }
}

typedef struct {
    void *out;
    const void *x, *gate, *dt, *b, *c;
    const float *rate, *bias, *skip; /* [channels, size], [channels] */
    float *state;                    /* [states, channels, size] */
    Seqs seqs;
    int64_t num_seqs, channels, size, x_stride, gate_stride, dt_stride, bc_stride, bf16;
} SelectJob;

INLINE void select_token(const SelectJob *job, Part held, long token, long from, long count, int bf16)
{
    long size = job->size;
    float x[CHANNELS], gate[CHANNELS], wait[CHANNELS], y[CHANNELS], b[MAX_DIM], c[MAX_DIM];
    widen(job->x, bf16, token * job->x_stride + from, count, 1.0f, x);
    widen(job->gate, bf16, token * job->gate_stride + from, count, 1.0f, gate);
    widen(job->dt, bf16, token * job->dt_stride + from, count, 1.0f, wait);
    widen(job->b, bf16, token * job->bc_stride, size, 1.0f, b);
    widen(job->c, bf16, token * job->bc_stride, size, 1.0f, c);
    for (long i = 0; i < count; i++) {
        const float *rate = job->rate + (from + i) * size;
        const float *before = held.before + i * size;
        float *after = held.after + i * size, steps = softplus(wait[i] + job->bias[from + i]);
        vf taken = splat(x[i] * steps), sum = {0};
        for (long n = 0; n < size; n += LANES) {
            vf keep = exp_lanes(take(rate, 0, n, size - n) * steps);
            vf new = fused(taken, take(b, 0, n, size - n), take(before, 0, n, size - n) * keep);
            put(after, 0, n, size - n, new);
            sum = fused(new, take(c, 0, n, size - n), sum);
        }
        y[i] = (lanes_sum(sum) + x[i] * job->skip[from + i]) * gate[i] / (1.0f + expf(-gate[i]));
    }
    narrow(y, job->out, bf16, token * job->channels + from, count);
}

void quire_state_select(const SelectJob *job)
{
    long blocks = (job->channels + CHANNELS - 1) / CHANNELS;
#pragma omp for schedule(static)
    for (long task = 0; task < job->num_seqs * blocks; task++) {
        long seq = task / blocks, from = task % blocks * CHANNELS, left = job->channels - from;
        long count = left < CHANNELS ? left : CHANNELS;
        long first = job->seqs.starts[seq], end = job->seqs.starts[seq + 1];
        long size = job->size, whole = job->channels * size;
        for (long token = first; token < end; token++) {
            Part held = state_part(job->state, &job->seqs, seq, token - first, whole, from * size, count * size);
            if (job->bf16)
                select_token(job, held, token, from, count, 1);
            else
                select_token(job, held, token, from, count, 0);
        }
    }
}

typedef struct {
    void *out;
    const void *qkv, *a, *b;
    const float *rate, *bias;
    float *state; /* [states, heads, key_dim, dim] */
    Seqs seqs;
    int64_t num_seqs, heads, key_heads, key_dim, dim, stride, a_stride, b_stride;
    int64_t by_channel; /* whether each key channel has a decay: a [tokens, heads * key_dim] */
    int64_t bf16;
    double eps, log_bound, beta_scale; /* log_bound: lower limit of the log decay, 0: none */
} DeltaJob;

/* Factor by which a token multiplies the state of a head, where `x` is a + bias. */
INLINE float kept_of(const DeltaJob *job, long head, float x)
{
    float rate = job->rate[head];
    return expf(job->log_bound != 0 ? (float)job->log_bound / (1.0f + expf(rate * x)) : softplus(x) * rate);
}

/* `x` divided by its L2 norm and multiplied by `factor`. */
INLINE void of_length(float *x, long size, float eps, float factor)
{
    vf squares = {0};
    for (long i = 0; i < size; i += LANES) {
        vf part = take(x, 0, i, size - i);
        squares = fused(part, part, squares);
    }
    factor /= sqrtf(lanes_sum(squares) + eps);
    for (long i = 0; i < size; i++)
        x[i] *= factor;
}

/* `count` vectors of values from `at` on; the last vector has `left` lanes. */
INLINE void delta_lanes(const DeltaJob *job, Part h, int count, long at, long left, const float *q, const float *k,
                        const float *v, const float *keep, float learned, float *y)
{
    vf known[SIDE] = {{0}}, written[SIDE], sum[SIDE] = {{0}};
    for (long n = 0; n < job->key_dim; n++)
        for (int i = 0; i < count; i++) {
            vf kept = take(h.before, 0, n * job->dim + at + i * LANES, left - i * LANES) * keep[n];
            put(h.after, 0, n * job->dim + at + i * LANES, left - i * LANES, kept);
            known[i] = fused(splat(k[n]), kept, known[i]);
        }
    for (int i = 0; i < count; i++)
        written[i] = (take(v, 0, at + i * LANES, left - i * LANES) - known[i]) * learned;
    for (long n = 0; n < job->key_dim; n++)
        for (int i = 0; i < count; i++) {
            vf kept = take(h.after, 0, n * job->dim + at + i * LANES, left - i * LANES);
            vf new = fused(splat(k[n]), written[i], kept);
            put(h.after, 0, n * job->dim + at + i * LANES, left - i * LANES, new);
            sum[i] = fused(splat(q[n]), new, sum[i]);
        }
    for (int i = 0; i < count; i++)
        put(y, 0, at + i * LANES, left - i * LANES, sum[i]);
}

INLINE void delta_token(const DeltaJob *job, Part h, long token, long head, int bf16)
{
    long dim = job->dim, key_dim = job->key_dim, keys = job->key_heads * key_dim, from = token * job->stride, at = 0;
    float q[MAX_DIM], k[MAX_DIM], v[MAX_DIM], y[MAX_DIM], keep[MAX_DIM];
    long q_at = from + head / (job->heads / job->key_heads) * key_dim;
    widen(job->qkv, bf16, q_at, key_dim, 1.0f, q);
    widen(job->qkv, bf16, q_at + keys, key_dim, 1.0f, k);
    widen(job->qkv, bf16, from + 2 * keys + head * dim, dim, 1.0f, v);
    of_length(q, key_dim, (float)job->eps, 1.0f / sqrtf((float)key_dim));
    of_length(k, key_dim, (float)job->eps, 1.0f);
    long decays = job->by_channel ? key_dim : 1, a_at = token * job->a_stride + head * decays;
    for (long n = 0; n < key_dim; n++)
        keep[n] = n < decays ? kept_of(job, head, one(job->a, bf16, a_at + n) + job->bias[head * decays + n]) : keep[0];
    float learned = (float)job->beta_scale / (1.0f + expf(-one(job->b, bf16, token * job->b_stride + head)));
    for (; at + SIDE * LANES <= dim; at += SIDE * LANES)
        delta_lanes(job, h, SIDE, at, SIDE * LANES, q, k, v, keep, learned, y);
    for (; at < dim; at += LANES)
        delta_lanes(job, h, 1, at, dim - at, q, k, v, keep, learned, y);
    narrow(y, job->out, bf16, (token * job->heads + head) * dim, dim);
}

void quire_state_delta(const DeltaJob *job)
{
    long held = job->key_dim * job->dim;
#pragma omp for schedule(static)
    for (long task = 0; task < job->num_seqs * job->heads; task++) {
        long seq = task / job->heads, head = task % job->heads;
        long first = job->seqs.starts[seq], end = job->seqs.starts[seq + 1];
        for (long token = first; token < end; token++) {
            Part h = state_part(job->state, &job->seqs, seq, token - first, job->heads * held, head * held, held);
            if (job->bf16)
                delta_token(job, h, token, head, 1);
            else
                delta_token(job, h, token, head, 0);
        }
    }
}

typedef struct {
    void *out;
    const void *x, *gate, *weight;
    int64_t num_rows, pieces, size, stride, gate_stride, gate_first, bf16;
    double eps;
} GatedNormJob;

INLINE vf silu_of(const void *gate, int bf16, long at, long left)
{
    vf x = take(gate, bf16, at, left);
    return x * sigmoid(x);
}

INLINE void gated_norm(const GatedNormJob *job, long row, long piece, int bf16)
{
    long size = job->size, x_at = row * job->stride + piece * size, gate_at = row * job->gate_stride + piece * size;
    vf squares = {0};
    for (long i = 0; i < size; i += LANES) {
        vf x = take(job->x, bf16, x_at + i, size - i);
        x = job->gate_first ? x * silu_of(job->gate, bf16, gate_at + i, size - i) : x;
        squares = fused(x, x, squares);
    }
    float factor = 1.0f / sqrtf(lanes_sum(squares) / (float)size + (float)job->eps);
    for (long i = 0; i < size; i += LANES) {
        vf x = take(job->x, bf16, x_at + i, size - i), gate = silu_of(job->gate, bf16, gate_at + i, size - i);
        x = rounded((job->gate_first ? x * gate : x) * factor, bf16) * take(job->weight, bf16, i, size - i);
        x = job->gate_first ? x : rounded(x, bf16) * gate;
        put(job->out, bf16, (row * job->pieces + piece) * size + i, size - i, x);
    }
}

void quire_gated_norm(const GatedNormJob *job)
{
#pragma omp for schedule(static)
    for (long task = 0; task < job->num_rows * job->pieces; task++)
        if (job->bf16)
            gated_norm(job, task / job->pieces, task % job->pieces, 1);
        else
            gated_norm(job, task / job->pieces, task % job->pieces, 0);
}

enum { SIGMOID, SILU, ITSELF }; /* as in reference/ssm.py */

typedef struct {
    void *out;
    const void *x, *gate;
    int64_t num_rows, size, stride, gate_stride, by, bf16;
} GateJob;

INLINE void gate_columns(const GateJob *job, long row, long from, int bf16)
{
    long end = from + COLUMNS < job->size ? from + COLUMNS : job->size;
    for (long i = from; i < end; i += LANES) {
        vf gate = take(job->gate, bf16, row * job->gate_stride + i, end - i);
        vf factor = job->by == ITSELF ? gate : job->by == SILU ? gate * sigmoid(gate) : sigmoid(gate);
        vf x = take(job->x, bf16, row * job->stride + i, end - i) * rounded(factor, bf16);
        put(job->out, bf16, row * job->size + i, end - i, x);
    }
}

void quire_gate(const GateJob *job)
{
    long pieces = (job->size + COLUMNS - 1) / COLUMNS;
#pragma omp for schedule(static)
    for (long task = 0; task < job->num_rows * pieces; task++)
        if (job->bf16)
            gate_columns(job, task / pieces, task % pieces * COLUMNS, 1);
        else
            gate_columns(job, task / pieces, task % pieces * COLUMNS, 0);
}
