/* Mixture of experts: routing and expert MLPs.
 *
 * Rows are pairs of a token and one of its experts, ordered by expert. The gate and up projections of all experts share one
 * range of tasks, and so do all down projections, so that no thread waits for a single expert.
 */
#include <math.h>
#include <omp.h>

#define ALL_LANES
#include "activations.h"
#include "matrix.h"
#include "lora.h"

#define MAX_EXPERTS 1024 /* equal to that in cpu/moe.py */
#define COLUMNS 512      /* columns per task of the sum over experts */
#define TAKEN INT32_MIN
#define LEFT_OUT (INT32_MIN + 1)

/* Structures have the same fields in the same order as in cpu/moe.py. */

typedef struct {
    int32_t *ids;   /* [tokens, per_token] */
    float *weights; /* [tokens, per_token] */
    const void *logits;
    const float *bias; /* affects the choice only; or NULL */
    int64_t num_tokens, num_experts, stride, per_token, sigmoid, renormalized, num_groups, top_groups, group_best, bf16;
    double scale;
} RouteJob;

/* Convert a float to an integer, with the same order; NaN is the largest, as in torch. */
INLINE int32_t rank_of(float x)
{
    int32_t bits;
    memcpy(&bits, &x, 4);
    return x != x ? INT32_MAX : bits >= 0 ? bits : bits ^ INT32_MAX;
}

/* Return the index of the first maximum, and mark it as taken. */
static long take_best(int32_t *ranks, long count)
{
    int32_t most = TAKEN;
    long at = 0;
    for (long i = 0; i < count; i++)
        most = ranks[i] > most ? ranks[i] : most;
    while (ranks[at] != most)
        at++;
    ranks[at] = TAKEN;
    return at;
}

/* Compute the scores of all experts for a token. `scores` is padded to whole vectors. */
static void score(const RouteJob *job, long token, float *scores)
{
    vf most = splat(-INFINITY), sum = {0}, x;
    long size = job->num_experts, at = token * job->stride;
    int bf16 = (int)job->bf16;
    for (long i = 0; i < size; i += LANES) {
        x = take(job->logits, bf16, at + i, size - i);
        for (long j = size - i; j < LANES; j++)
            x[j] = -INFINITY;
        store(scores + i, x);
        most = larger(most, x);
    }
    vf top = splat(lanes_max(most));
    for (long i = 0; i < size; i += LANES) {
        x = load(scores + i);
        x = job->sigmoid ? 1.0f / (exp_lanes(smaller(splat(88.0f), -x)) + 1.0f) : exp_lanes(x - top);
        store(scores + i, x);
        sum += x;
    }
    float share = 1.0f / lanes_sum(sum);
    for (long i = 0; !job->sigmoid && i < size; i += LANES)
        store(scores + i, load(scores + i) * share);
}

/* Mask all groups but the best. */
static void choose_groups(const RouteJob *job, const float *choice, int32_t *ranks)
{
    int32_t worth[MAX_EXPERTS], within[MAX_EXPERTS];
    long size = job->num_experts / job->num_groups;
    for (long group = 0; group < job->num_groups; group++) {
        float sum = 0;
        memcpy(within, ranks + group * size, (size_t)size * sizeof *within);
        for (long i = 0; i < job->group_best; i++)
            sum += choice[group * size + take_best(within, size)];
        worth[group] = rank_of(sum);
    }
    for (long i = 0; i < job->top_groups; i++)
        take_best(worth, job->num_groups);
    for (long i = 0; i < job->num_experts; i++)
        ranks[i] = worth[i / size] == TAKEN ? ranks[i] : LEFT_OUT;
}

void quire_route(const RouteJob *job)
{
#pragma omp for schedule(static)
    for (long token = 0; token < job->num_tokens; token++) {
        float scores[MAX_EXPERTS], choice[MAX_EXPERTS], sum = 0, *weights = job->weights + token * job->per_token;
        int32_t ranks[MAX_EXPERTS], *ids = job->ids + token * job->per_token;
        score(job, token, scores);
        for (long i = 0; i < job->num_experts; i++) {
            choice[i] = scores[i] + (job->bias ? job->bias[i] : 0);
            ranks[i] = rank_of(choice[i]);
        }
        if (job->num_groups > 1)
            choose_groups(job, choice, ranks);
        for (long i = 0; i < job->per_token; i++) {
            ids[i] = (int32_t)take_best(ranks, job->num_experts);
            weights[i] = scores[ids[i]];
            sum += weights[i];
        }
        for (long i = 0; i < job->per_token; i++)
            weights[i] = (job->renormalized ? weights[i] / sum : weights[i]) * (float)job->scale;
    }
}

enum { GATE_UP, DOWN };

/* The rows of one expert. Arrays of two are for the two GEMMs. */
typedef struct {
    int64_t expert, first, count;
    int64_t prepared[2]; /* offset of its rows in scratch memory */
    int64_t tasks[2];    /* cumulative number of tasks, including its own */
} Group;

typedef struct {
    void *out; /* [tokens, hidden] */
    const void *x;
    const int32_t *ids; /* [tokens, per_token]; negative: an expert of another rank */
    const float *weights;
    const Matrix *gate_up, *down;          /* [experts, num_parts], [experts] */
    const float *gate_up_bias, *down_bias; /* [experts, 2 * size], [experts, hidden]; or NULL */
    int64_t *counts;                       /* [1 + experts]: the number of groups; then the rows of each expert */
    Group *groups;                         /* [min(experts, rows)] */
    int32_t *tokens, *places;              /* the token of a row; the row of a pair, or -1 */
    uint8_t *prepared_x, *prepared_inner;
    float *inner, *outer; /* [rows, 2 * size], [rows, hidden] */
    const int32_t *slots;  /* adapter slot of each token, or -1; NULL: no adapters */
    const void *gate_up_a, *gate_up_b, *down_a, *down_b; /* [slots][experts, parts * rank, inputs], [slots][experts, outputs, rank] */
    float *ranks;                                        /* [rows, 2 * rank] */
    int64_t num_tokens, per_token, num_experts, num_parts, hidden, size, x_stride, activation, bf16;
    int64_t prepared_x_bytes, prepared_inner_bytes; /* of a row */
    int64_t rank, slot_stride, adapter_bf16;        /* slot_stride: equal for all four matrices */
    double bound;                                   /* of the activation, or 0 */
} ExpertsJob;

static LinearJob product_of(const ExpertsJob *job, const Group *group, int which)
{
    long expert = group->expert, first = group->first;
    LinearJob product = {.num_rows = group->count};
    if (which == GATE_UP) {
        product.x = job->x, product.x_stride = job->x_stride, product.x_bf16 = job->bf16;
        product.x_rows = job->num_tokens > 1 ? job->tokens + first : NULL;
        product.parts = job->gate_up + expert * job->num_parts, product.num_parts = job->num_parts;
        product.bias = job->gate_up_bias ? job->gate_up_bias + expert * 2 * job->size : NULL;
        product.out = job->inner + first * 2 * job->size, product.out_stride = 2 * job->size;
    } else {
        product.x = job->inner + first * 2 * job->size, product.x_stride = 2 * job->size;
        product.parts = job->down + expert, product.num_parts = 1;
        product.bias = job->down_bias ? job->down_bias + expert * job->hidden : NULL;
        product.out = job->outer + first * job->hidden, product.out_stride = job->hidden;
    }
    return product;
}

/* Sort the rows by expert, and compute the offsets of each expert. */
static void make_groups(const ExpertsJob *job)
{
    long rows = job->num_tokens * job->per_token, first = 0, prepared[2] = {0}, tasks[2] = {0};
    int64_t *next = job->counts + 1;
    Group *group = job->groups;
    memset(next, 0, (size_t)job->num_experts * sizeof *next);
    for (long pair = 0; pair < rows; pair++)
        if (job->ids[pair] >= 0)
            next[job->ids[pair]]++;
    for (long expert = 0; expert < job->num_experts; expert++) {
        long count = next[expert];
        next[expert] = first;
        if (!count)
            continue;
        *group = (Group){expert, first, count, {prepared[0], prepared[1]}, {0}};
        for (int which = GATE_UP; which <= DOWN; which++) {
            LinearJob product = product_of(job, group, which);
            prepared[which] += quire_linear_rows(&product);
            group->tasks[which] = tasks[which] += quire_linear_tasks(&product);
        }
        first += count;
        group++;
    }
    job->counts[0] = group - job->groups;
    for (long pair = 0; pair < rows; pair++) {
        long row = job->ids[pair] < 0 ? -1 : next[job->ids[pair]]++;
        job->places[pair] = (int32_t)row;
        if (row >= 0)
            job->tokens[row] = (int32_t)(pair / job->per_token);
    }
}

static long rows_of(const ExpertsJob *job)
{
    const Group *end = job->groups + job->counts[0];
    return job->counts[0] ? end[-1].first + end[-1].count : 0;
}

/* Prepare a row of a group. With the last row, also prepare the padding rows of its panel. */
static void prepare(const LinearJob *product, long row, uint8_t *into)
{
    long rows = quire_linear_rows(product), end = row + 1 < product->num_rows ? row + 1 : rows;
    for (; row < end && rows; row++)
        quire_linear_prepare(product, row, into);
}

static const uint8_t *prepare_x(const ExpertsJob *job)
{
    const Group *group = job->groups;
    long rows = rows_of(job);
    if (job->num_tokens == 1 && rows) { /* x is equal for all experts: every thread has its own copy */
        uint8_t *own = job->prepared_x + omp_get_thread_num() * job->prepared_x_bytes;
        LinearJob product = product_of(job, group, GATE_UP);
        prepare(&product, 0, own);
        return own;
    }
#pragma omp for schedule(static)
    for (long row = 0; row < rows; row++) {
        for (; row >= group->first + group->count; group++)
            ;
        LinearJob product = product_of(job, group, GATE_UP);
        prepare(&product, row - group->first, job->prepared_x + group->prepared[GATE_UP] * job->prepared_x_bytes);
    }
    return job->prepared_x;
}

static void activate_rows(const ExpertsJob *job)
{
    const Group *group = job->groups;
    long size = job->size, rows = rows_of(job);
#pragma omp for schedule(static)
    for (long row = 0; row < rows; row++) {
        for (; row >= group->first + group->count; group++)
            ;
        float *at = job->inner + row * 2 * size;
        activate((int)job->activation, (float)job->bound, at, 0, at, size, at, 0, size, 0);
        LinearJob product = product_of(job, group, DOWN);
        prepare(&product, row - group->first, job->prepared_inner + group->prepared[DOWN] * job->prepared_inner_bytes);
    }
}

static void multiply(const ExpertsJob *job, int which, const uint8_t *prepared, long row_bytes)
{
    const Group *group = job->groups;
    long num = job->counts[0], tasks = num ? group[num - 1].tasks[which] : 0;
#pragma omp for schedule(monotonic : dynamic, 1)
    for (long task = 0; task < tasks; task++) {
        for (; task >= group->tasks[which]; group++)
            ;
        LinearJob product = product_of(job, group, which);
        long before = group > job->groups ? group[-1].tasks[which] : 0;
        quire_linear_task(&product, prepared + group->prepared[which] * row_bytes, task - before);
    }
}

/* Sum the experts of a token in the order of their choice. */
static void add_up(const ExpertsJob *job)
{
    long pieces = (job->hidden + COLUMNS - 1) / COLUMNS, each = job->per_token;
#pragma omp for schedule(static)
    for (long task = 0; task < job->num_tokens * pieces; task++) {
        long token = task / pieces, start = task % pieces * COLUMNS, end = at_most(start + COLUMNS, job->hidden);
        for (long i = start; i < end; i += LANES) {
            vf sum = {0};
            for (long pair = token * each; pair < (token + 1) * each; pair++)
                if (job->places[pair] >= 0)
                    sum = fused(take(job->outer, 0, job->places[pair] * job->hidden + i, end - i), splat(job->weights[pair]), sum);
            put(job->out, (int)job->bf16, token * job->hidden + i, end - i, sum);
        }
    }
}

/* Add the LoRA outputs of the rows to one of the two GEMMs. */
static void adapt(const ExpertsJob *job, int which)
{
    const Group *group = job->groups;
    long rank = job->rank, size = job->size, hidden = job->hidden, rows = rows_of(job), bf16 = job->adapter_bf16;
#pragma omp for schedule(monotonic : dynamic, 1)
    for (long row = 0; row < rows; row++) {
        for (; row >= group->first + group->count; group++)
            ;
        long token = job->tokens[row], slot = job->slots[token], at = slot * job->slot_stride, expert = group->expert;
        float *ranks = job->ranks + row * 2 * rank, *inner = job->inner + row * 2 * size;
        if (slot < 0)
            continue;
        if (which == GATE_UP) {
            Numbers x = {job->x, token * job->x_stride, (int)job->bf16};
            Numbers a = {job->gate_up_a, at + expert * 2 * rank * hidden, (int)bf16};
            Numbers b = {job->gate_up_b, at + expert * 2 * size * rank, (int)bf16};
            quire_lora_shrink(x, a, hidden, 0, 2 * rank, ranks);
            quire_lora_expand(ranks, b, rank, 0, size, inner, 0, 0);
            quire_lora_expand(ranks + rank, b, rank, size, 2 * size, inner, 0, 0);
        } else {
            Numbers x = {inner, 0, 0}, a = {job->down_a, at + expert * rank * size, (int)bf16};
            Numbers b = {job->down_b, at + expert * hidden * rank, (int)bf16};
            quire_lora_shrink(x, a, size, 0, rank, ranks);
            quire_lora_expand(ranks, b, rank, 0, hidden, job->outer + row * hidden, 0, 0);
        }
    }
}

void quire_experts(const ExpertsJob *job)
{
#pragma omp single
    make_groups(job);
    const uint8_t *x = prepare_x(job);
    multiply(job, GATE_UP, x, job->num_tokens > 1 ? job->prepared_x_bytes : 0);
    if (job->slots)
        adapt(job, GATE_UP);
    activate_rows(job);
    multiply(job, DOWN, job->prepared_inner, job->prepared_inner_bytes);
    if (job->slots)
        adapt(job, DOWN);
    add_up(job);
}
