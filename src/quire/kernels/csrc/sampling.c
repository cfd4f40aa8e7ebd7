/* Greedy or random sampling of one token per row of logits. The reference in torch is `sampling/random.py`.
 *
 * The token of a row depends only on that row, and not on the number of threads.
 */
#include <math.h>
#include <omp.h>

#define ALL_LANES
#include "simd.h"

#define VOCAB 4096 /* logits per task, which fit in the L1 cache */
#define BLOCK 512  /* weights per block of the cumulative sum */
#define STEPS 64   /* histogram bins per unit of a logit */
#define PLACES 2048

/* The same fields in the same order as in kernels/cpu/sampling.py. */
typedef struct {
    int64_t *out; /* [rows] */
    const void *x; /* [rows, size] */
    float *found; /* [rows, pieces of VOCAB] the maximum of each piece */
    void *memory;   /* quire_sample_room(size) bytes per thread */
    const float *temperature; /* NULL: all rows are greedy, like rows with 0 */
    const int32_t *top_k; /* 0: all */
    const float *top_p, *min_p;
    const int64_t *seeds, *positions;
    const int32_t *mask_of; /* [rows] mask of each row, -1: none; NULL: no masks */
    const uint32_t *masks;  /* [masks, words] one bit per token: whether it is allowed */
    int64_t num_rows, size, stride, bf16, num_words;
} SampleJob;

/* The mask of one row. Tokens after its last word are disallowed. */
typedef struct {
    const uint32_t *words;
    long count; /* -1: no mask */
} Mask;

INLINE Mask mask_of(const SampleJob *job, long row)
{
    if (!job->mask_of || job->mask_of[row] < 0)
        return (Mask){NULL, -1};
    return (Mask){job->masks + job->mask_of[row] * job->num_words, job->num_words};
}

/* The mask bits of the 32 tokens from `at` on. */
INLINE uint32_t allowed(Mask mask, long at)
{
    return mask.count < 0 ? UINT32_MAX : at / 32 < mask.count ? mask.words[at / 32] : 0;
}

/* Logits from token `i` of the row at `at`, with minus infinity for disallowed tokens. */
INLINE vf take_allowed(const void *x, int bf16, long at, long i, long left, Mask mask)
{
    static const uint32_t each[16] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
    vf logit = take(x, bf16, at + i, left);
    if (mask.count < 0)
        return logit;
    vu bits;
    memcpy(&bits, each, sizeof bits);
    return pick((vi)((allowed(mask, i) >> i % 32 & bits) != 0), logit, splat(-INFINITY));
}

/* Scratch memory of one thread. */
typedef struct {
    double sums[PLACES]; /* sums of weights per histogram bin, later per block */
    int64_t counts[PLACES];
    float *logits, *weights, *some; /* [size] each */
} Scratch;

int64_t quire_sample_room(int64_t size) { return (int64_t)sizeof(Scratch) + (3 * (size + LANES) * 4 + 63) / 64 * 64; }

static int beats(float x, float best) { return x > best || (x != x && best == best); }

/* Maximum logit of a row from token `first` on; NaN is the largest value. */
INLINE float largest(const void *x, int bf16, long at, long first, long count, Mask mask)
{
    vf most[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)}, bad = {0};
    long i = first, end = first + count;
    for (; i + 4 * LANES <= end; i += 4 * LANES) {
        if (!allowed(mask, i) && !allowed(mask, i + 4 * LANES - 1))
            continue;
        for (int j = 0; j < 4; j++) {
            vf now = take_allowed(x, bf16, at, i + j * LANES, LANES, mask);
            most[j] = pick(now > most[j], now, most[j]);
            bad = pick(now != now, now, bad);
        }
    }
    float best = -INFINITY;
    for (int j = 0; j < 4; j++)
        for (int k = 0; k < LANES; k++)
            best = most[j][k] > best ? most[j][k] : best;
    int any_nan = lanes_sum(bad) != 0;
    for (; i < end; i++) {
        float now = allowed(mask, i) >> i % 32 & 1 ? take(x, bf16, at + i, 1)[0] : -INFINITY;
        best = now > best ? now : best;
        any_nan |= now != now;
    }
    return any_nan ? NAN : best;
}

/* Index of the first occurrence of the result of `largest`, from `first` on. */
INLINE long place_of_largest(const void *x, int bf16, long at, long first, long count, Mask mask, float best)
{
    for (long i = first; i < first + count; i++) {
        float now = allowed(mask, i) >> i % 32 & 1 ? take(x, bf16, at + i, 1)[0] : -INFINITY;
        if (now == best || (now != now && best != best))
            return i;
    }
    return first;
}

/* The finaliser of splitmix64. */
static uint64_t mixed(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* A random number in [0, 1) from a seed and a position. */
static double uniform(int64_t seed, int64_t position)
{
    uint64_t counter = mixed((uint64_t)seed) + 0x9E3779B97F4A7C15u * ((uint64_t)position + 1);
    return (double)(mixed(counter) >> 11) * 0x1p-53;
}

/* Sort in descending order. */
static void sift(float *x, long at, long count)
{
    for (long child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && x[child + 1] < x[child])
            child++;
        if (x[at] <= x[child])
            return;
        float kept = x[at];
        x[at] = x[child];
        x[child] = kept;
    }
}

static void sort_falling(float *x, long count)
{
    for (long at = count / 2; at-- > 0;)
        sift(x, at, count);
    for (long last = count - 1; last > 0; last--) {
        float least = x[0];
        x[0] = x[last];
        x[last] = least;
        sift(x, 0, last);
    }
}

/* Histogram bin of a logit; bins are in descending order of logits. */
INLINE long place_of(float logit, float peak)
{
    float at = (peak - logit) * STEPS;
    return at < PLACES - 1 ? (long)at : PLACES - 1;
}

/* Copy the values of a histogram bin that are at least `floor` to scratch->some. */
static long collect(Scratch *scratch, long size, float peak, long place, float floor)
{
    long count = 0;
    for (long i = 0; i < size; i++) {
        float logit = scratch->logits[i];
        scratch->some[count] = logit;
        count += logit >= floor && place_of(logit, peak) == place;
    }
    return count;
}

static void count_places(Scratch *scratch, long size, float peak, Mask mask)
{
    memset(scratch->sums, 0, sizeof scratch->sums);
    memset(scratch->counts, 0, sizeof scratch->counts);
    for (long first = 0; first < size; first += 32) {
        long end = first + 32 < size ? first + 32 : size;
        if (!allowed(mask, first)) {
            scratch->counts[PLACES - 1] += end - first;
            continue;
        }
        for (long i = first; i < end; i++) {
            long place = place_of(scratch->logits[i], peak);
            scratch->counts[place]++;
            scratch->sums[place] += scratch->weights[i];
        }
    }
}

/* The k-th largest logit. */
static float kth(Scratch *scratch, long size, float peak, long k)
{
    long place = 0, before = 0;
    for (; before + scratch->counts[place] < k; place++)
        before += scratch->counts[place];
    sort_falling(scratch->some, collect(scratch, size, peak, place, -INFINITY));
    return scratch->some[k - before - 1];
}

static float weight_of(float logit, float peak) { return exp_one(logit - peak); }

/* Smallest logit of the smallest set of top tokens with `share` of the total weight of the tokens that are at least `floor`. */
static float nucleus(Scratch *scratch, long size, float peak, double share, float floor)
{
    long last = place_of(floor, peak), place = 0;
    double total = 0, so_far = 0;
    if (floor > -INFINITY) { /* the floor splits a bin */
        long count = collect(scratch, size, peak, last, floor);
        scratch->sums[last] = 0;
        for (long i = 0; i < count; i++)
            scratch->sums[last] += weight_of(scratch->some[i], peak);
    }
    for (long i = 0; i <= last; i++)
        total += scratch->sums[i];
    for (; place < last && so_far + scratch->sums[place] < share * total; place++)
        so_far += scratch->sums[place];
    long count = collect(scratch, size, peak, place, floor);
    sort_falling(scratch->some, count);
    for (long i = 0; i < count; i++) {
        so_far += weight_of(scratch->some[i], peak);
        if (so_far >= share * total)
            return scratch->some[i];
    }
    return count ? scratch->some[count - 1] : floor;
}

/* Smallest logit that min_p, then top_k, then top_p keep. */
static float floor_of(const SampleJob *job, long row, Scratch *scratch, float peak, Mask mask)
{
    long k = job->top_k[row], size = job->size;
    float floor = peak + logf(job->min_p[row]);
    if (k <= 0 && !(job->top_p[row] < 1))
        return floor;
    count_places(scratch, size, peak, mask);
    if (k > 0 && k < size) {
        float least = kth(scratch, size, peak, k);
        floor = least > floor ? least : floor;
    }
    if (job->top_p[row] < 1) {
        float least = nucleus(scratch, size, peak, job->top_p[row], floor);
        floor = least > floor ? least : floor;
    }
    return floor;
}

static long at_most(long left) { return left < BLOCK ? left : BLOCK; }

typedef double vd __attribute__((vector_size(8 * LANES)));

/* Sum of one block, always in the same order. */
static double sum_of(const float *x, long count)
{
    vd sums = {0};
    for (long i = 0; i < count; i += LANES)
        sums += __builtin_convertvector(take(x, 0, i, count - i), vd);
    double sum = 0;
    for (int i = 0; i < LANES; i++)
        sum += sums[i];
    return sum;
}

/* Compute the weights of one block, and its logits if `limited`. Returns whether any token is allowed. */
INLINE int weigh(const SampleJob *job, long row, long first, long end, float peak, Scratch *scratch, Mask mask, int bf16,
                 int limited)
{
    float scale = job->temperature[row];
    int some = 0;
    for (long from = first; from < end; from += 32) {
        long to = from + 32 < end ? from + 32 : end;
        int any = allowed(mask, from) != 0;
        some |= any;
        for (long i = from; i < to; i += LANES) {
            vf logit = splat(-INFINITY), weight = {0};
            if (any) {
                logit = take_allowed(job->x, bf16, row * job->stride, i, to - i, mask) / scale;
                weight = exp_lanes(logit - peak);
            }
            if (limited)
                put(scratch->logits, 0, i, to - i, logit);
            put(scratch->weights, 0, i, to - i, weight);
        }
    }
    return some;
}

/* Sample a row with a temperature; `best` is the index of the maximum logit. */
INLINE long by_chance(const SampleJob *job, long row, long best, Scratch *scratch, Mask mask, int bf16)
{
    long size = job->size, blocks = (size + BLOCK - 1) / BLOCK;
    float peak = take_allowed(job->x, bf16, row * job->stride, best, 1, mask)[0] / job->temperature[row];
    int limited = job->top_k[row] > 0 || job->top_p[row] < 1 || job->min_p[row] > 0;
    double total = 0, before = 0;
    if (!(fabsf(peak) < INFINITY))
        return best;
    if (limited) {
        weigh(job, row, 0, size, peak, scratch, mask, bf16, 1);
        float floor = floor_of(job, row, scratch, peak, mask);
        for (long i = 0; i < size; i += LANES) {
            vf logit = take(scratch->logits, 0, i, size - i), weight = take(scratch->weights, 0, i, size - i);
            put(scratch->weights, 0, i, size - i, pick(logit < floor, splat(0), weight));
        }
    }
    for (long block = 0; block < blocks; block++) {
        long first = block * BLOCK, count = at_most(size - first);
        int some = limited || weigh(job, row, first, first + count, peak, scratch, mask, bf16, 0);
        total += scratch->sums[block] = some ? sum_of(scratch->weights + first, count) : 0;
    }
    double target = uniform(job->seeds[row], job->positions[row]) * total;
    long last = best;
    for (long block = 0; block < blocks; block++) {
        if (before + scratch->sums[block] <= target) {
            before += scratch->sums[block];
            continue;
        }
        double inside = 0;
        for (long i = block * BLOCK; i < block * BLOCK + at_most(size - block * BLOCK); i++) {
            if (scratch->weights[i] == 0)
                continue;
            last = i;
            inside += scratch->weights[i];
            if (before + inside > target)
                return i;
        }
        return last; /* rounding: the sum of the block was larger */
    }
    return last;
}

INLINE void sample_rows(const SampleJob *job, int bf16)
{
    long pieces = (job->size + VOCAB - 1) / VOCAB;
#pragma omp for schedule(static)
    for (long task = 0; task < job->num_rows * pieces; task++) {
        long row = task / pieces, first = task % pieces * VOCAB;
        long count = first + VOCAB < job->size ? VOCAB : job->size - first;
        job->found[task] = largest(job->x, bf16, row * job->stride, first, count, mask_of(job, row));
    }
    char *own = (char *)job->memory + omp_get_thread_num() * quire_sample_room(job->size);
    Scratch *scratch = (Scratch *)own;
#pragma omp for schedule(dynamic, 1)
    for (long row = 0; row < job->num_rows; row++) {
        const float *found = job->found + row * pieces;
        Mask mask = mask_of(job, row);
        long piece = 0;
        for (long i = 1; i < pieces; i++)
            if (beats(found[i], found[piece]))
                piece = i;
        long first = piece * VOCAB, count = first + VOCAB < job->size ? VOCAB : job->size - first;
        long best = place_of_largest(job->x, bf16, row * job->stride, first, count, mask, found[piece]);
        if (job->temperature && job->temperature[row] > 0) {
            long padded = (job->size + LANES - 1) / LANES * LANES;
            scratch->logits = (float *)(own + sizeof(Scratch));
            scratch->weights = scratch->logits + padded;
            scratch->some = scratch->weights + padded;
            best = by_chance(job, row, best, scratch, mask, bf16);
        }
        job->out[row] = best;
    }
}

void quire_sample(const SampleJob *job)
{
    if (job->bf16)
        sample_rows(job, 1);
    else
        sample_rows(job, 0);
}
