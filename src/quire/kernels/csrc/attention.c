/* Paged attention over a whole batch.
 *
 * A row is one query of one head. The result of a row depends only on the row and its keys: tiles of keys start at fixed
 * positions of the sequence and are merged in order. So it is bitwise equal in any batch and with any split of the work.
 */
/* Loads that the compiler moves far ahead of their use would take registers from the sums of the inner loops. */
#pragma GCC optimize("no-schedule-insns")

#include <omp.h>

#include "attention_tiles.h"
#include "cache_dtype.h"

#define BLOCK_ROWS 192 /* maximum rows per task */
#define LONG_ROWS (LANES == 16 ? 384 : BLOCK_ROWS) /* maximum rows per task of long prompts: keys are copied half as often */
#define SHARES 4       /* minimum tasks per thread for which tasks have LONG_ROWS */
#define FEW_ROWS 16    /* maximum rows per KV head to be memory-bound: all heads share one pass over the keys */
#define TURN_ROWS 32   /* minimum rows for which transposing the keys pays off */
#define FEW_KEYS 8     /* keys processed at a time for memory-bound tasks */
#define LINE 16        /* floats per cache line, for alignment */
#define LOG2_E 1.4426950408889634

/* The same fields in the same order as in cpu/attention.py. */
typedef struct {
    void *out; /* [tokens, heads, head_dim], contiguous, with the dtype of q */
    const void *q;
    const void *k_cache; /* [blocks, block_size, kv_heads, head_dim], tokens slot_stride apart */
    const void *v_cache;
    const int32_t *rows;         /* [seqs] */
    const int32_t *block_tables; /* [rows, table_width] */
    const int32_t *query_starts;
    const int32_t *seq_lens;
    const void *sinks;    /* [heads]: logits without a value; or NULL */
    const float *slopes;  /* [heads]: ALiBi slopes, subtracted from the score per token of distance; or NULL */
    const int32_t *reach; /* [tokens]: last position that each attends to, never decreasing in a sequence; NULL: its own */
    int64_t q_stride;  /* between tokens */
    int64_t table_width, num_seqs, heads, kv_heads, head_dim, slot_stride, block_size;
    int64_t window;               /* number of keys that a query attends to; 0: all */
    int64_t chunked;              /* whether the window begins at a multiple of its size, not at a distance from the query */
    int64_t q_bf16, kept, sinks_bf16; /* kept: a cache dtype of cache_dtype.h */
    double scale, v_scale, softcap; /* v_scale: factor of the summed values; softcap 0: none */
    int64_t max_tasks, max_saved; /* upper bounds, by quire_attention_room */
    void *memory;                 /* scratch memory; quire_attention_room returns its size */
} Job;

/* Part of the attention that one thread computes. Two tasks fill a cache line. */
typedef struct {
    int32_t seq, kv_head, num_kv_heads, first_query, num_queries;
    int32_t tile;   /* the only tile to compute, -1: all tiles */
    int64_t saved;  /* offset of its partial sums until they are merged */
} Task;

typedef struct {
    float *most, *sum, *out; /* largest score, sum of weights, weighted values: [rows], [rows], [rows, dim] */
} Sums;

typedef struct {
    float *q, *weights, *keys, *values;
    Sums part, total;
} Scratch;

static long at_most(long x, long bound) { return x < bound ? x : bound; }
static long at_least(long x, long bound) { return x > bound ? x : bound; }

static long whole(long count, long step) { return (count + step - 1) / step * step; }

/* Heads are zero-padded to whole vectors in scratch memory. */
static long dim_of(const Job *job) { return whole(job->head_dim, LANES); }

static Sums carve(float *memory, long rows)
{
    rows = whole(rows, LINE);
    return (Sums){memory, memory + rows, memory + 2 * rows};
}

static long sums_size(long rows, long dim) { return 2 * whole(rows, LINE) + whole(rows * dim, LINE); }

static void clear(Sums *sums, long rows, long dim)
{
    for (long i = 0; i < rows; i++)
        sums->most[i] = -INFINITY;
    memset(sums->sum, 0, (size_t)rows * sizeof(float));
    memset(sums->out, 0, (size_t)(rows * dim) * sizeof(float));
}

/* Prefetch `count` keys and values of one head. */
static void fetch(const Job *job, long at, long count)
{
    long bytes = kept_bytes((int)job->kept);
    for (long i = 0; i < count; i++, at += job->slot_stride)
        for (long d = at * bytes; d < (at + job->head_dim) * bytes; d += 64) {
            __builtin_prefetch((const char *)job->k_cache + d);
            __builtin_prefetch((const char *)job->v_cache + d);
        }
}

/* Convert `heads` consecutive heads of the cache to float, multiplied by `factor`. */
static void copy_heads(const void *from, int kind, long at, long heads, long head_dim, float factor, float *into)
{
    long dim = whole(head_dim, LANES);
    if (dim == head_dim && kind != KEPT_INT8)
        widen_kept(from, kind, at, heads * dim, factor, into);
    else
        for (; heads > 0; heads--, at += head_step(kind, head_dim), into += dim) {
            widen_kept(from, kind, at, head_dim, factor, into);
            memset(into + head_dim, 0, (size_t)(dim - head_dim) * sizeof(float));
        }
}

static int is_copied(const Job *job) { return job->kept != KEPT_F32 || job->head_dim % LANES; }

/* Return pointers to the keys and values of positions [first, end) of one tile, as float. Keys and values of a single head are
 * copied to contiguous memory, because many rows read them. */
static void gather(const Job *job, const Task *task, long tile, long first, long end, Scratch *scratch,
                   const float **keys, const float **values)
{
    const int32_t *table = job->block_tables + job->rows[task->seq] * job->table_width;
    long size = job->block_size, step = job->slot_stride, heads = task->num_kv_heads, width = heads * dim_of(job);
    int pack = is_copied(job) || heads == 1;
    long first_head = task->kv_head * head_step((int)job->kept, job->head_dim);
    for (long position = first; position < end;) {
        long block = quotient(position, size), until = at_most((block + 1) * size, end);
        long at = (table[block] * size + position - block * size) * step + first_head;
        if (pack && until < end)
            fetch(job, table[block + 1] * size * step + first_head, at_most(size, end - until));
        for (; position < until; position++, at += step) {
            long k = position - tile;
            if (pack) {
                keys[k] = scratch->keys + k * width, values[k] = scratch->values + k * width;
                copy_heads(job->k_cache, (int)job->kept, at, heads, job->head_dim, 1.0f, scratch->keys + k * width);
                copy_heads(job->v_cache, (int)job->kept, at, heads, job->head_dim, 1.0f, scratch->values + k * width);
            } else {
                keys[k] = (const float *)job->k_cache + at;
                values[k] = (const float *)job->v_cache + at;
            }
        }
    }
}

/* First position that a query at `place` attends to. */
static long first_seen(const Job *job, long place)
{
    if (!job->window)
        return 0;
    return job->chunked ? place - place % job->window : at_least(place - job->window + 1, 0);
}

/* Position of the first query of a task. */
static long place_of(const Job *job, const Task *task)
{
    long query_len = job->query_starts[task->seq + 1] - job->query_starts[task->seq];
    return job->seq_lens[task->seq] - query_len + task->first_query;
}

/* End of the positions that a query of a task attends to. */
static long seen_by(const Job *job, const Task *task, long query)
{
    return 1 + (job->reach ? job->reach[job->query_starts[task->seq] + task->first_query + query] : place_of(job, task) + query);
}

/* Token and head of row `row` of a task. */
static long token_of(const Job *job, const Task *task, long row, long *head)
{
    long group = quotient(job->heads, job->kv_heads), query = quotient(row, group), kv_head = quotient(query, task->num_queries);
    *head = (task->kv_head + kv_head) * group + row - query * group;
    return job->query_starts[task->seq] + task->first_query + query - kv_head * task->num_queries;
}

/* Convert the scores of one row with keys [first, end) of a tile to softmax weights. */
static void soften_row(const Job *job, const Task *task, long tile, long first, long end, long query, long row, Scratch *scratch)
{
    long place = place_of(job, task) + query;
    float *scores = scratch->weights + row * TILE;
    long count = at_least((end - tile + STEP - 1) / STEP * STEP, STEP), head;
    if (job->slopes) {
        token_of(job, task, row, &head);
        lean(scores, count, job->slopes[head] * (float)LOG2_E, tile - place);
    }
    long seen_first = at_least(first, first_seen(job, place)) - tile;
    for (long k = 0; k < at_most(seen_first, count); k++)
        scores[k] = -INFINITY;
    for (long k = at_least(at_most(end, seen_by(job, task, query)) - tile, 0); k < count; k++)
        scores[k] = -INFINITY;
    soften(scores, count, (float)(job->softcap * LOG2_E), scratch->part.most + row, scratch->part.sum + row);
}

/* Attention of few rows per KV head: one pass over the keys for all heads, in memory order. */
static void attend_few(const Job *job, const Task *task, long tile, long first, long end, const float *const *keys,
                       const float *const *values, Scratch *scratch)
{
    long heads = task->num_kv_heads, dim = dim_of(job), group = job->heads / job->kv_heads, each = task->num_queries * group;
    long begin = first - tile, until = end - tile, fours = (until + 3) & ~3L;
    for (long k = begin & ~3L; k < until; k += FEW_KEYS)
        for (long head = 0; head < heads; head++)
            for (long r = 0, row = head * each; r < each; r += ROWS, row += ROWS)
                score_some(at_most(each - r, ROWS), scratch->q + row * dim, keys, head * dim, k, at_most(k + FEW_KEYS, fours), dim,
                           scratch->weights + row * TILE);
    for (long row = 0; row < heads * each; row++)
        soften_row(job, task, tile, first, end, quotient(row, group) - quotient(row, each) * task->num_queries, row, scratch);
    for (long k = begin; k < until; k += FEW_KEYS)
        for (long head = 0; head < heads; head++)
            for (long r = 0, row = head * each; r < each; r += ROWS, row += ROWS)
                mix_some(at_most(each - r, ROWS), k > begin, scratch->weights + row * TILE, values, head * dim, k,
                         at_most(k + FEW_KEYS, until), dim, scratch->part.out + row * dim);
}

/* Scores with contiguous keys [first, end), rounded down to a multiple of 4. */
static void score_packed(long rows, const float *q, const float *const *keys, long first, long end, long dim, float *out)
{
    long low = first & ~3L, high = (end + 3) & ~3L;
#ifdef HAS_NEON
    if (rows == 4 && dim > 4) {
        score_four(q, keys[first] - first * dim, low, high, dim, out);
        return;
    }
#endif
    score_some(rows, q, keys, 0, low, high, dim, out);
}

/* Weighted sums of values [first, end), added to `out`; if `first` is `begin`, `out` is overwritten. */
static void mix_packed(long rows, const float *weights, const float *const *values, long begin, long first, long end, long dim,
                       float *out)
{
#ifdef HAS_NEON
    long whole = (end - first) & ~3L;
    if (rows == 4 && dim % 16 == 0 && whole > 0 && first == begin) {
        for (long d = 0; d < dim; d += 16)
            mix_sixteen(weights + first, values[first] + d, whole, dim, out + d);
        if (first + whole < end)
            mix_some(rows, 1, weights, values, 0, first + whole, end, dim, out);
        return;
    }
#endif
    mix_some(rows, first > begin, weights, values, 0, first, end, dim, out);
}

/* Scores of all rows with keys [begin, end), in parts that stay in the L1 cache if the keys are transposed first. */
static void score_rows(const Job *job, const Task *task, long tile, long begin, long end, const float *const *keys,
                       Scratch *scratch)
{
    long dim = dim_of(job), group = job->heads / job->kv_heads, all = task->num_queries * group;
#ifdef HAS_AVX512
    float columns[MAX_TURNED * TILE];
    if (all >= TURN_ROWS && dim <= MAX_TURNED) {
        long first = begin / TURNED_KEYS * TURNED_KEYS;
        turn_keys(keys[begin] - begin * dim, first, whole(end, TURNED_KEYS), dim, columns);
        for (long k = first; k < end; k += TURNED_KEYS)
            for (long row = 0; row < all; row += TURNED_ROWS) {
                long rows = at_most(all - row, TURNED_ROWS);
                if (seen_by(job, task, quotient(row + rows - 1, group)) > tile + k)
                    score_turned(rows, scratch->q + row * dim, columns + k * dim, dim, scratch->weights + row * TILE + k);
            }
        return;
    }
#endif
    for (long row = 0; row < all; row += ROWS) {
        long rows = at_most(all - row, ROWS), seen_end = seen_by(job, task, quotient(row + rows - 1, group)) - tile;
        score_packed(rows, scratch->q + row * dim, keys, begin, at_most(end, seen_end), dim, scratch->weights + row * TILE);
    }
}

/* Attention of many rows of one KV head, so that keys and then values stay in the CPU cache. A group of ROWS rows stops at the
 * last position that its last row attends to. */
static void attend_many(const Job *job, const Task *task, long tile, long first, long end, const float *const *keys,
                        const float *const *values, Scratch *scratch)
{
    long dim = dim_of(job), group = job->heads / job->kv_heads, all = task->num_queries * group, begin = first - tile;
    score_rows(job, task, tile, begin, end - tile, keys, scratch);
    for (long row = 0; row < all; row += ROWS) {
        long rows = at_most(all - row, ROWS), seen_end = at_most(end, seen_by(job, task, quotient(row + rows - 1, group)));
        for (long r = row; r < row + rows; r++)
            soften_row(job, task, tile, first, seen_end, quotient(r, group), r, scratch);
    }
    for (long k = begin; k < end - tile; k = (k / MIXED_KEYS + 1) * MIXED_KEYS)
        for (long row = 0; row < all; row += ROWS) {
            long rows = at_most(all - row, ROWS), last = quotient(row + rows - 1, group);
            long seen_end = at_most(end, seen_by(job, task, last)) - tile;
            if (k < seen_end || k == begin)
                mix_packed(rows, scratch->weights + row * TILE, values, begin, k,
                           at_most((k / MIXED_KEYS + 1) * MIXED_KEYS, seen_end), dim, scratch->part.out + row * dim);
        }
}

/* Attention of all rows of a task, ordered by KV head, to the keys [first, end) of one tile. */
static void attend_tile(const Job *job, const Task *task, long tile, long first, long end, Scratch *scratch)
{
    const float *keys[TILE], *values[TILE];
    gather(job, task, tile, first, end, scratch, keys, values);
    for (long k = (first - tile) & ~3L; k < ((end - tile + 3) & ~3L); k++) /* padded to a multiple of 4 with the first key */
        if (k < first - tile || k >= end - tile)
            keys[k] = keys[first - tile];
    if (task->num_kv_heads > 1)
        attend_few(job, task, tile, first, end, keys, values, scratch);
    else
        attend_many(job, task, tile, first, end, keys, values, scratch);
}

/* Add `part` to `total`, both scaled to the larger maximum. */
static void merge(Sums *total, const Sums *part, long rows, long dim)
{
    for (long row = 0; row < rows; row += LANES) {
        long left = rows - row;
        vf old = take(total->most, 0, row, left), new = take(part->most, 0, row, left), most = larger(old, new);
        vf base = pick(most == -INFINITY, splat(0), most), share[2] = {old - base, new - base};
        two_to(2, share);
        put(total->most, 0, row, left, most);
        put(total->sum, 0, row, left,
            fused(take(total->sum, 0, row, left), share[0], take(part->sum, 0, row, left) * share[1]));
        for (long r = 0; r < at_most(left, LANES); r++)
            for (long d = (row + r) * dim; d < (row + r + 1) * dim; d += LANES)
                store(total->out + d, fused(load(total->out + d), splat(share[0][r]), load(part->out + d) * share[1][r]));
    }
}

/* Set the range [first, end) of the keys that the queries of a task attend to. */
static void seen(const Job *job, const Task *task, long *first, long *end)
{
    long query_len = job->query_starts[task->seq + 1] - job->query_starts[task->seq];
    long place = job->seq_lens[task->seq] - query_len + task->first_query;
    *first = first_seen(job, place);
    *end = seen_by(job, task, task->num_queries - 1);
}

static long rows_of(const Job *job, const Task *task)
{
    return task->num_kv_heads * task->num_queries * (job->heads / job->kv_heads);
}

/* Final factor of the summed values of a row. */
static float share_of(const Job *job, const Sums *sums, long row, long head)
{
    float sum = sums->sum[row], most = sums->most[row], sink;
    if (sum == 0) /* padding attends to nothing */
        return 0;
    if (!job->sinks)
        return 1.0f / sum;
    widen(job->sinks, (int)job->sinks_bf16, head, 1, (float)LOG2_E, &sink);
    float top = most > sink ? most : sink;
    vf parts = splat(sink - top);
    parts[0] = most - top;
    two_to(1, &parts);
    return parts[0] / (sum * parts[0] + parts[1]);
}

static void write_out(const Job *job, const Task *task, Sums *sums)
{
    long dim = dim_of(job), head;
    for (long row = 0; row < rows_of(job, task); row++) {
        long token = token_of(job, task, row, &head);
        float share = share_of(job, sums, row, head) * (float)job->v_scale;
        for (long d = row * dim; d < (row + 1) * dim; d += LANES)
            store(sums->out + d, load(sums->out + d) * share);
        narrow(sums->out + row * dim, job->out, (int)job->q_bf16, (token * job->heads + head) * job->head_dim, job->head_dim);
    }
}

static void run_task(const Job *job, const Task *task, Scratch *scratch, float *saved)
{
    long rows = rows_of(job, task), dim = dim_of(job), head, first, end;
    seen(job, task, &first, &end);
    for (long row = 0; row < rows; row++) {
        long at = token_of(job, task, row, &head) * job->q_stride;
        copy_heads(job->q, (int)job->q_bf16, at + head * job->head_dim, 1, job->head_dim, (float)(job->scale * LOG2_E),
                   scratch->q + row * dim);
    }
    clear(&scratch->total, rows, dim);
    long from = task->tile < 0 ? first / TILE : task->tile, until = task->tile < 0 ? (end + TILE - 1) / TILE : from + 1;
    for (long at = from; at < until; at++) {
        long tile = at * TILE;
        attend_tile(job, task, tile, at_least(tile, first), at_most(tile + TILE, end), scratch);
        if (task->tile < 0)
            merge(&scratch->total, &scratch->part, rows, dim);
    }
    if (task->tile < 0)
        write_out(job, task, &scratch->total);
    else
        memcpy(saved + task->saved, scratch->part.most, (size_t)sums_size(rows, dim) * sizeof(float));
}

/* Merge the tiles of `count` tasks that were computed separately; `task` is the first. */
static void join(const Job *job, const Task *task, long count, Scratch *scratch, float *saved)
{
    long rows = rows_of(job, task), dim = dim_of(job);
    clear(&scratch->total, rows, dim);
    for (long i = 0; i < count; i++) {
        Sums part = carve(saved + task[i].saved, rows);
        merge(&scratch->total, &part, rows, dim);
    }
    write_out(job, task, &scratch->total);
}

static int same_rows(const Task *a, const Task *b) { return a->seq == b->seq && a->kv_head == b->kv_head; }

/* Maximum queries per task of a sequence. A long sequence has several blocks of queries, so it is not split by tiles. */
static long step_of(const Job *job, long query_len, long num_threads)
{
    long group = job->heads / job->kv_heads, rows = query_len * group;
    int is_long = rows > LONG_ROWS && rows * job->kv_heads >= SHARES * num_threads * LONG_ROWS;
    return at_least((is_long ? LONG_ROWS : BLOCK_ROWS) / group, 1);
}

/* List the tasks and return their number. The last queries of a sequence, which attend to the most keys, come first. A sequence
 * with a single block of queries is also split by tiles if there are several threads. */
static long list_tasks(const Job *job, Task *tasks, long num_threads, long *saved_size)
{
    long group = job->heads / job->kv_heads, count = 0;
    *saved_size = 0;
    for (int32_t seq = 0; seq < job->num_seqs; seq++) {
        long query_len = job->query_starts[seq + 1] - job->query_starts[seq], step = step_of(job, query_len, num_threads);
        int32_t together = query_len * group <= FEW_ROWS ? (int32_t)job->kv_heads : 1;
        for (int32_t kv_head = 0; kv_head < job->kv_heads; kv_head += together)
            for (long at = (query_len - 1) / step * step; at >= 0; at -= step) {
                Task task = {seq, kv_head, together, (int32_t)at, (int32_t)at_most(step, query_len - at), -1, 0};
                long first, end;
                seen(job, &task, &first, &end);
                long from = first / TILE, until = (end + TILE - 1) / TILE;
                if (query_len > step || until - from <= 1 || num_threads == 1) {
                    tasks[count++] = task;
                    continue;
                }
                for (long tile = from; tile < until; tile++) {
                    task.tile = (int32_t)tile;
                    task.saved = *saved_size;
                    *saved_size += sums_size(rows_of(job, &task), dim_of(job));
                    tasks[count++] = task;
                }
            }
    }
    return count;
}

/* Maximum rows of a task. */
static long max_rows(const Job *job)
{
    long group = job->heads / job->kv_heads;
    return at_least(at_least(LONG_ROWS / group, 1) * group, at_least(FEW_ROWS / group * group, 1) * job->kv_heads);
}

static long scratch_size(const Job *job)
{
    long rows = max_rows(job), dim = dim_of(job), width = is_copied(job) ? job->kv_heads * dim : dim;
    return whole(rows * dim, LINE) + rows * TILE + 2 * TILE * width + 2 * sums_size(rows, dim);
}

static Scratch carve_scratch(const Job *job, float *memory, long task_rows)
{
    Scratch scratch;
    long rows = max_rows(job), dim = dim_of(job), width = is_copied(job) ? job->kv_heads * dim : dim;
    scratch.q = memory;
    scratch.weights = scratch.q + whole(rows * dim, LINE);
    scratch.keys = scratch.weights + rows * TILE;
    scratch.values = scratch.keys + TILE * width;
    scratch.part = carve(scratch.values + TILE * width, task_rows);
    scratch.total = carve(scratch.values + TILE * width + sums_size(rows, dim), task_rows);
    return scratch;
}

/* Set the upper bounds of the job for batches of these sizes; return the bytes of scratch memory. */
int64_t quire_attention_room(Job *job, int64_t num_tokens, int64_t max_query_len, int64_t max_seq_len,
                             int64_t num_threads)
{
    long group = job->heads / job->kv_heads, step = at_least(BLOCK_ROWS / group, 1);
    long splits = job->num_seqs * job->kv_heads * (max_seq_len / TILE + 1);
    job->max_tasks = whole(splits + job->kv_heads * (num_tokens / step + job->num_seqs), 2);
    job->max_saved = splits * sums_size(at_most(step, max_query_len) * group, dim_of(job));
    long each = job->max_tasks * (long)sizeof(Task) + scratch_size(job) * (long)sizeof(float);
    return num_threads * each + job->max_saved * (long)sizeof(float);
}

void quire_attention(const Job *job)
{
    long saved_size, thread = omp_get_thread_num(), num_threads = omp_get_num_threads();
    /* Every thread builds the same list of tasks, in its own memory. */
    Task *tasks = (Task *)job->memory + thread * job->max_tasks;
    float *saved = (float *)((Task *)job->memory + num_threads * job->max_tasks);
    float *own = saved + job->max_saved + thread * scratch_size(job);
    long count = list_tasks(job, tasks, num_threads, &saved_size);
#pragma omp for schedule(dynamic, 1)
    for (long i = 0; i < count; i++) {
        Scratch scratch = carve_scratch(job, own, rows_of(job, tasks + i));
        run_task(job, tasks + i, &scratch, saved);
    }
    if (!saved_size)
        return;
#pragma omp for schedule(dynamic, 1)
    for (long i = 0; i < count; i++) {
        if (tasks[i].tile < 0 || (i > 0 && same_rows(tasks + i, tasks + i - 1)))
            continue;
        long number = 1;
        while (i + number < count && same_rows(tasks + i, tasks + i + number))
            number++;
        Scratch scratch = carve_scratch(job, own, rows_of(job, tasks + i));
        join(job, tasks + i, number, &scratch, saved);
    }
}
