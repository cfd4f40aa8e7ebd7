/* Paged attention over a whole batch.
 *
 * A row is one query of one head. What is computed for a row depends on that row and its keys alone: keys are
 * taken in tiles and ranges that start at fixed positions of the sequence, ranges are merged in order. So the
 * result is the same to the last bit whatever else is in the batch, however the work is split.
 */
/* Loads that are moved up, far from where they are used, take registers from the sums of the inner loops. */
#pragma GCC optimize("no-schedule-insns")

#include <math.h>
#include <omp.h>

#include "simd.h"

#define TILE 128      /* keys that are scored before the running maximum moves */
#define RANGE 128     /* keys that are summed apart, on another thread if there is one; a multiple of TILE */
#define BLOCK_ROWS 96 /* rows that share the keys of a task */
#define SHARE 48      /* of these, the rows that go through a tile before the next ones: a multiple of ROWS */
#define ROWS 4        /* rows of the inner loops */
#define STEP (2 * LANES) /* scores that are weighed side by side */
#define FEW_ROWS 16   /* rows of a key head that leave memory as what takes time: all heads share a pass over it */
#define FEW_KEYS 8    /* keys whose values are taken before the next ones are touched, then */
#define DIM_CHUNK (LANES == 4 ? 4 : 2) /* vectors of a value that the inner loop holds per row */

/* The same fields, in the same order, as in attention.py. */
typedef struct {
    void *out; /* [tokens, heads, head_dim], contiguous, of the type of q */
    const void *q;
    const void *k_cache; /* [blocks, block_size, kv_heads, head_dim] */
    const void *v_cache;
    const int32_t *rows;         /* [seqs] */
    const int32_t *block_tables; /* [rows, table_width] */
    const int32_t *query_starts;
    const int32_t *seq_lens;
    int64_t q_stride; /* between tokens */
    int64_t table_width, num_seqs, heads, kv_heads, head_dim, block_size;
    int64_t window;               /* 0: all */
    int64_t q_bf16, kv_bf16;
    double scale, softcap;        /* softcap 0: none */
    int64_t max_tasks, max_saved; /* upper bounds, by quire_attention_room */
    void *memory;                 /* scratch of as many bytes as quire_attention_room says */
} Job;

typedef struct {
    int32_t seq, kv_head, num_kv_heads, first_query, num_queries;
    int32_t range;  /* the only one to sum, -1: all of them */
    int64_t saved;  /* where its sums are kept until they are merged */
} Task;

typedef struct {
    float *most, *sum, *out; /* largest score, sum of weights, weighted values: [rows], [rows], [rows, head_dim] */
} Sums;

typedef struct {
    float *q, *weights, *keys, *values;
    Sums part, total;
} Scratch;

static long at_most(long x, long bound) { return x < bound ? x : bound; }
static long at_least(long x, long bound) { return x > bound ? x : bound; }

static Sums carve(float *memory, long rows) { return (Sums){memory, memory + rows, memory + 2 * rows}; }

static void clear(Sums *sums, long rows, long dim)
{
    for (long i = 0; i < rows; i++)
        sums->most[i] = -INFINITY;
    memset(sums->sum, 0, (size_t)rows * sizeof(float));
    memset(sums->out, 0, (size_t)(rows * dim) * sizeof(float));
}

/* Scores of some rows with 4 keys, which lie `from` floats behind the pointers. */
INLINE void score4(int rows, const float *q, const float *const *keys, long from, long dim, float *out)
{
    vf sums[ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < 4; k++)
            sums[r][k] = load(q + r * dim) * load(keys[k] + from);
    for (long d = LANES; d < dim; d += LANES) {
        vf key[4];
        for (int k = 0; k < 4; k++)
            key[k] = load(keys[k] + from + d);
        for (int r = 0; r < rows; r++) {
            vf query = load(q + r * dim + d);
            for (int k = 0; k < 4; k++)
                sums[r][k] = fused(query, key[k], sums[r][k]);
        }
    }
    for (int r = 0; r < rows; r++)
        lanes_sum4(sums[r], out + r * TILE);
}

INLINE void mix_key(int rows, int vectors, const float *values, const factors *weights, int at, vf (*sums)[4])
{
    for (int i = 0; i < vectors; i++) {
        vf value = load(values + i * LANES);
        for (int r = 0; r < rows; r++)
            sums[r][i] = fused_by(value, weights[r], at, sums[r][i]);
    }
}

/* Add the weighted values of keys [first, end) of a tile to `vectors` vectors, from `d` on, of some rows. */
INLINE void mix(int rows, int vectors, const float *weights, const float *const *values, long first, long end, long d,
                long dim, float *out)
{
    vf sums[ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < vectors; i++)
            sums[r][i] = load(out + r * dim + i * LANES);
    long k = first;
    for (; k + FACTORS <= end; k += FACTORS) {
        factors weight[ROWS];
        for (int r = 0; r < rows; r++)
            weight[r] = load_factors(weights + r * TILE + k);
        mix_key(rows, vectors, values[k] + d, weight, 0, sums);
        if (FACTORS > 1) {
            mix_key(rows, vectors, values[k + 1] + d, weight, 1, sums);
            mix_key(rows, vectors, values[k + 2] + d, weight, 2, sums);
            mix_key(rows, vectors, values[k + 3] + d, weight, 3, sums);
        }
    }
    for (; k < end; k++)
        for (int i = 0; i < vectors; i++) {
            vf value = load(values[k] + d + i * LANES);
            for (int r = 0; r < rows; r++)
                sums[r][i] = fused(value, splat(weights[r * TILE + k]), sums[r][i]);
        }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < vectors; i++)
            store(out + r * dim + i * LANES, sums[r][i]);
}

/* The values lie `from` floats behind the pointers. */
INLINE void mix_all(int rows, const float *weights, const float **values, long from, long first, long end, long dim,
                    float *out)
{
    long d = 0;
    for (; d + DIM_CHUNK * LANES <= dim; d += DIM_CHUNK * LANES)
        mix(rows, DIM_CHUNK, weights, values, first, end, from + d, dim, out + d);
    for (; d < dim; d += LANES)
        mix(rows, 1, weights, values, first, end, from + d, dim, out + d);
}

/* Weights of STEP scores, none above `most`: e^(score - most), to 2 units in the last place, 0 where it is below
 * the least normal number. As exp_lanes, with fewer steps. */
INLINE void weigh(float *scores, float most, vf *total)
{
    const float shift = 12582912.0f + 127; /* 1.5 * 2^23 and the exponent of 1: the low bits are an exponent */
    for (int i = 0; i < 2; i++) {
        vf x = larger(splat(-88.1f), load(scores + i * LANES) - most);
        vf shifted = fused(x, splat(1.44269504f), splat(shift)), n = shifted - shift;
        vf r = fused(n, splat(-1.42860677e-6f), fused(n, splat(-0.693145752f), x)), square = r * r;
        vf high = fused(r, splat(1.0f / 120), splat(1.0f / 24)), low = fused(r, splat(1.0f / 6), splat(0.5f));
        high = fused(square, splat(1.0f / 720), high);
        vf poly = fused(square, fused(square, high, low), r + 1.0f);
        vf weight = poly * (vf)((vi)shifted << 23);
        store(scores + i * LANES, weight);
        total[i] += weight;
    }
}

static void cap(float *scores, long count, float softcap)
{
    for (long k = 0; k < count; k += LANES) {
        vf x = load(scores + k);
        vf twice = exp_lanes(pick(x > 44 * softcap, splat(44), x / softcap) * 2.0f);
        store(scores + k, pick(x == -INFINITY, x, softcap - 2.0f * softcap / (twice + 1.0f)));
    }
}

/* The first `count` scores of one row in, a multiple of STEP, weights out; the sums so far are scaled to the new
 * maximum. What lies behind is not seen: it would add nothing. */
static void soften(float *scores, long count, float softcap, long dim, float *most, float *sum, float *out)
{
    if (softcap > 0)
        cap(scores, count, softcap);
    vf top[2] = {load(scores), load(scores + LANES)}, total[2] = {{0}};
    for (long k = STEP; k < count; k += STEP)
        for (int i = 0; i < 2; i++)
            top[i] = larger(load(scores + k + i * LANES), top[i]);
    float now = lanes_max(larger(top[0], top[1]));
    now = now > *most ? now : *most;
    if (now == -INFINITY) { /* the row sees nothing of this tile, nor of those before */
        memset(scores, 0, (size_t)count * sizeof(float));
        return;
    }
    for (long k = 0; k < count; k += STEP)
        weigh(scores + k, now, total);
    if (*most != -INFINITY && now != *most) {
        float fade = exp_one(*most - now);
        *sum *= fade;
        for (long d = 0; d < dim; d += LANES)
            store(out + d, load(out + d) * fade);
    }
    *most = now;
    *sum += lanes_sum(total[0] + total[1]);
}

/* Ask for `count` keys and values of one head, which are copied soon. */
static void fetch(const Job *job, long at, long count)
{
    long bytes = job->kv_bf16 ? 2 : 4;
    for (long i = 0; i < count; i++, at += job->kv_heads * job->head_dim)
        for (long d = at * bytes; d < (at + job->head_dim) * bytes; d += 64) {
            __builtin_prefetch((const char *)job->k_cache + d);
            __builtin_prefetch((const char *)job->v_cache + d);
        }
}

/* Where the keys and values of positions [first, end) lie, as float; first and end within one tile. Those of a
 * single head are put side by side: many rows read them. */
static void gather(const Job *job, const Task *task, long tile, long first, long end, Scratch *scratch,
                   const float **keys, const float **values)
{
    const int32_t *table = job->block_tables + job->rows[task->seq] * job->table_width;
    long size = job->block_size, step = job->kv_heads * job->head_dim, width = task->num_kv_heads * job->head_dim;
    int pack = job->kv_bf16 || task->num_kv_heads == 1;
    for (long position = first; position < end;) {
        long offset = position % size, until = at_most(position - offset + size, end);
        long at = (table[position / size] * size + offset) * step + task->kv_head * job->head_dim;
        if (pack && until < end)
            fetch(job, table[until / size] * size * step + task->kv_head * job->head_dim, at_most(size, end - until));
        for (; position < until; position++, at += step) {
            long k = position - tile;
            if (pack) {
                keys[k] = scratch->keys + k * width, values[k] = scratch->values + k * width;
                widen(job->k_cache, (int)job->kv_bf16, at, width, 1.0f, scratch->keys + k * width);
                widen(job->v_cache, (int)job->kv_bf16, at, width, 1.0f, scratch->values + k * width);
            } else {
                keys[k] = (const float *)job->k_cache + at;
                values[k] = (const float *)job->v_cache + at;
            }
        }
    }
}

/* Scores of some rows with keys [first, end), a multiple of 4. */
INLINE void score_all(int rows, const float *q, const float *const *keys, long from, long first, long end, long dim,
                      float *out)
{
    for (long k = first; k < end; k += 4)
        score4(rows, q, keys + k, from, dim, out + k);
}

static void score_some(long rows, const float *q, const float *const *keys, long from, long first, long end, long dim,
                       float *out)
{
    switch (rows) {
    case 4: score_all(4, q, keys, from, first, end, dim, out); break;
    case 3: score_all(3, q, keys, from, first, end, dim, out); break;
    case 2: score_all(2, q, keys, from, first, end, dim, out); break;
    default: score_all(1, q, keys, from, first, end, dim, out);
    }
}

static void mix_some(long rows, const float *weights, const float **values, long from, long first, long end, long dim,
                     float *out)
{
    switch (rows) {
    case 4: mix_all(4, weights, values, from, first, end, dim, out); break;
    case 3: mix_all(3, weights, values, from, first, end, dim, out); break;
    case 2: mix_all(2, weights, values, from, first, end, dim, out); break;
    default: mix_all(1, weights, values, from, first, end, dim, out);
    }
}

/* Scores of rows [row, until) of a task to weights, among the keys [first, end) of a tile. */
static void soften_rows(const Job *job, const Task *task, long tile, long first, long end, long row, long until,
                        Scratch *scratch)
{
    long group = job->heads / job->kv_heads, each = task->num_queries * group, dim = job->head_dim;
    long query_len = job->query_starts[task->seq + 1] - job->query_starts[task->seq];
    long place = job->seq_lens[task->seq] - query_len + task->first_query; /* position of the first query */
    long count = (end - tile + STEP - 1) / STEP * STEP;
    int all_seen = end - first == TILE && end <= place + 1 &&
                   (!job->window || first > place + task->num_queries - 1 - job->window);
    Sums *part = &scratch->part;
    for (; row < until; row++) {
        float *scores = scratch->weights + row * TILE;
        if (!all_seen) {
            long position = place + row % each / group;
            long seen_first = at_least(first, job->window ? position - job->window + 1 : 0) - tile;
            for (long k = 0; k < at_most(seen_first, count); k++)
                scores[k] = -INFINITY;
            for (long k = at_least(at_most(end, position + 1) - tile, 0); k < count; k++)
                scores[k] = -INFINITY;
        }
        soften(scores, count, (float)job->softcap, dim, part->most + row, part->sum + row, part->out + row * dim);
    }
}

/* Rows lie key head by key head, `each` of them. A few rows take every key in one pass over all heads, as it
 * lies in memory; of many, some at a time go through the whole tile, which stays in the cache. */
static void attend_tile(const Job *job, const Task *task, long tile, long first, long end, Scratch *scratch)
{
    const float *keys[TILE], *values[TILE];
    long heads = task->num_kv_heads, dim = job->head_dim;
    long each = task->num_queries * (job->heads / job->kv_heads), low = (first - tile) & ~3L;
    long high = (end - tile + 3) & ~3L, step = heads > 1 ? FEW_KEYS : TILE, share = heads > 1 ? each : SHARE;
    gather(job, task, tile, first, end, scratch, keys, values);
    for (long k = low; k < high; k++) /* filled up to fours with a key that is there; masked later */
        if (k < first - tile || k >= end - tile)
            keys[k] = keys[first - tile];
    for (long begin = 0; begin < each; begin += share) {
        long until = at_most(begin + share, each);
        for (long k = low; k < high; k += step)
            for (long head = 0; head < heads; head++)
                for (long r = begin, row = head * each + r; r < until; r += ROWS, row += ROWS)
                    score_some(at_most(until - r, ROWS), scratch->q + row * dim, keys, head * dim, k,
                               at_most(k + step, high), dim, scratch->weights + row * TILE);
        soften_rows(job, task, tile, first, end, begin, heads > 1 ? heads * each : until, scratch);
        for (long k = first - tile; k < end - tile; k += step)
            for (long head = 0; head < heads; head++)
                for (long r = begin, row = head * each + r; r < until; r += ROWS, row += ROWS)
                    mix_some(at_most(until - r, ROWS), scratch->weights + row * TILE, values, head * dim, k,
                             at_most(k + step, end - tile), dim, scratch->part.out + row * dim);
    }
}

static void merge(Sums *total, const Sums *part, long rows, long dim)
{
    for (long r = 0; r < rows; r++) {
        if (part->most[r] == -INFINITY)
            continue;
        float most = part->most[r] > total->most[r] ? part->most[r] : total->most[r];
        float old = exp_one(total->most[r] - most), new = exp_one(part->most[r] - most);
        total->most[r] = most;
        total->sum[r] = total->sum[r] * old + part->sum[r] * new;
        for (long d = r * dim; d < (r + 1) * dim; d += LANES)
            store(total->out + d, load(total->out + d) * old + load(part->out + d) * new);
    }
}

/* The keys that the queries of a task see. */
static void seen(const Job *job, const Task *task, long *first, long *end)
{
    long query_len = job->query_starts[task->seq + 1] - job->query_starts[task->seq];
    long place = job->seq_lens[task->seq] - query_len + task->first_query;
    *first = job->window ? at_least(place - job->window + 1, 0) : 0;
    *end = place + task->num_queries;
}

static long rows_of(const Job *job, const Task *task)
{
    return task->num_kv_heads * task->num_queries * (job->heads / job->kv_heads);
}

/* Where row `row` of a task stands in the batch: its token and its head. */
static long token_of(const Job *job, const Task *task, long row, long *head)
{
    long group = job->heads / job->kv_heads, each = task->num_queries * group;
    *head = (task->kv_head + row / each) * group + row % group;
    return job->query_starts[task->seq] + task->first_query + row % each / group;
}

static void write_out(const Job *job, const Task *task, Sums *sums)
{
    long dim = job->head_dim, head;
    for (long row = 0; row < rows_of(job, task); row++) {
        long token = token_of(job, task, row, &head);
        float share = sums->sum[row] == 0 ? 0 : 1.0f / sums->sum[row]; /* padding sees nothing */
        for (long d = row * dim; d < (row + 1) * dim; d += LANES)
            store(sums->out + d, load(sums->out + d) * share);
        narrow(sums->out + row * dim, job->out, (int)job->q_bf16, (token * job->heads + head) * dim, dim);
    }
}

static void run_task(const Job *job, const Task *task, Scratch *scratch, float *saved)
{
    long rows = rows_of(job, task), dim = job->head_dim, head, first, end;
    seen(job, task, &first, &end);
    for (long row = 0; row < rows; row++) {
        long at = token_of(job, task, row, &head) * job->q_stride;
        widen(job->q, (int)job->q_bf16, at + head * dim, dim, (float)job->scale, scratch->q + row * dim);
    }
    clear(&scratch->total, rows, dim);
    long from = task->range < 0 ? first / RANGE : task->range;
    long until = task->range < 0 ? (end + RANGE - 1) / RANGE : from + 1;
    for (long range = from; range < until; range++) {
        clear(&scratch->part, rows, dim);
        for (long tile = range * RANGE; tile < (range + 1) * RANGE; tile += TILE)
            if (tile < end && tile + TILE > first)
                attend_tile(job, task, tile, at_least(tile, first), at_most(tile + TILE, end), scratch);
        if (task->range < 0)
            merge(&scratch->total, &scratch->part, rows, dim);
    }
    if (task->range < 0)
        write_out(job, task, &scratch->total);
    else
        memcpy(saved + task->saved, scratch->part.most, (size_t)(rows * (dim + 2)) * sizeof(float));
}

/* Sum up the ranges that were computed apart: `task` is the first of `count`. */
static void join(const Job *job, const Task *task, long count, Scratch *scratch, float *saved)
{
    long rows = rows_of(job, task), dim = job->head_dim;
    clear(&scratch->total, rows, dim);
    for (long i = 0; i < count; i++) {
        Sums part = carve(saved + task[i].saved, rows);
        merge(&scratch->total, &part, rows, dim);
    }
    write_out(job, task, &scratch->total);
}

static int same_rows(const Task *a, const Task *b) { return a->seq == b->seq && a->kv_head == b->kv_head; }

/* The last queries of a sequence, which see most, come first. Where the queries of a sequence make one block
 * only, it is split by ranges too, if there is a thread to share them with. */
static long list_tasks(const Job *job, Task *tasks, int split, long *saved_size)
{
    long group = job->heads / job->kv_heads, step = at_least(BLOCK_ROWS / group, 1), count = 0;
    *saved_size = 0;
    for (int32_t seq = 0; seq < job->num_seqs; seq++) {
        long query_len = job->query_starts[seq + 1] - job->query_starts[seq];
        int32_t together = query_len * group <= FEW_ROWS ? (int32_t)job->kv_heads : 1;
        for (int32_t kv_head = 0; kv_head < job->kv_heads; kv_head += together)
            for (long at = (query_len - 1) / step * step; at >= 0; at -= step) {
                Task task = {seq, kv_head, together, (int32_t)at, (int32_t)at_most(step, query_len - at), -1, 0};
                long first, end;
                seen(job, &task, &first, &end);
                long from = first / RANGE, until = (end + RANGE - 1) / RANGE;
                if (query_len > step || until - from <= 1 || !split) {
                    tasks[count++] = task;
                    continue;
                }
                for (long range = from; range < until; range++) {
                    task.range = (int32_t)range;
                    task.saved = *saved_size;
                    *saved_size += rows_of(job, &task) * (job->head_dim + 2);
                    tasks[count++] = task;
                }
            }
    }
    return count;
}

/* The most rows of a task, and the most key heads of one. */
static long max_rows(const Job *job)
{
    long group = job->heads / job->kv_heads;
    return at_least(at_least(BLOCK_ROWS / group, 1) * group, at_least(FEW_ROWS / group * group, 1) * job->kv_heads);
}

static long scratch_size(const Job *job)
{
    long rows = max_rows(job), dim = job->head_dim, width = job->kv_bf16 ? job->kv_heads * dim : dim;
    return rows * (dim + TILE) + 2 * TILE * width + 2 * rows * (dim + 2);
}

static Scratch carve_scratch(const Job *job, float *memory, long task_rows)
{
    Scratch scratch;
    long rows = max_rows(job), dim = job->head_dim, width = job->kv_bf16 ? job->kv_heads * dim : dim;
    scratch.q = memory;
    scratch.weights = scratch.q + rows * dim;
    scratch.keys = scratch.weights + rows * TILE;
    scratch.values = scratch.keys + TILE * width;
    scratch.part = carve(scratch.values + TILE * width, task_rows);
    scratch.total = carve(scratch.values + TILE * width + rows * (dim + 2), task_rows);
    return scratch;
}

/* Sets the upper bounds of the job for batches of these sizes; how many bytes of scratch it takes. */
int64_t quire_attention_room(Job *job, int64_t num_tokens, int64_t max_query_len, int64_t max_seq_len,
                             int64_t num_threads)
{
    long group = job->heads / job->kv_heads, step = at_least(BLOCK_ROWS / group, 1);
    long splits = job->num_seqs * job->kv_heads * (max_seq_len / RANGE + 1);
    job->max_tasks = splits + job->kv_heads * (num_tokens / step + job->num_seqs);
    job->max_saved = splits * at_most(step, max_query_len) * group * (job->head_dim + 2);
    long each = job->max_tasks * (long)sizeof(Task) + scratch_size(job) * (long)sizeof(float);
    return num_threads * each + job->max_saved * (long)sizeof(float);
}

void quire_attention(const Job *job)
{
    long saved_size, thread = omp_get_thread_num(), num_threads = omp_get_num_threads();
    /* Every thread makes the same list for itself. */
    Task *tasks = (Task *)job->memory + thread * job->max_tasks;
    float *saved = (float *)((Task *)job->memory + num_threads * job->max_tasks);
    float *own = saved + job->max_saved + thread * scratch_size(job);
    long count = list_tasks(job, tasks, num_threads > 1, &saved_size);
#pragma omp for schedule(dynamic, 1)
    for (long i = 0; i < count; i++) {
        Scratch scratch = carve_scratch(job, own, rows_of(job, tasks + i));
        run_task(job, tasks + i, &scratch, saved);
    }
    if (!saved_size)
        return;
#pragma omp for schedule(dynamic, 1)
    for (long i = 0; i < count; i++) {
        if (tasks[i].range < 0 || (i > 0 && same_rows(tasks + i, tasks + i - 1)))
            continue;
        long number = 1;
        while (i + number < count && same_rows(tasks + i, tasks + i + number))
            number++;
        Scratch scratch = carve_scratch(job, own, rows_of(job, tasks + i));
        join(job, tasks + i, number, &scratch, saved);
    }
}
