/* Products with packed weights: out = x W^T.
 *
 * Weights come in groups of 8 rows and blocks of 32 columns, as quantized.py lays them out: 8 scales, for Q4_1
 * 8 minima (all float16), then the codes, 4 columns of each of the 8 rows side by side. Q4 codes hold column i in
 * the low and column 16 + i in the high half of a byte. x is rounded to 8 bits, with a scale for each 32 columns.
 * What is computed for a row of x does not depend on the other rows.
 */
#include <math.h>
#include <stdlib.h>

#include "simd.h"

#define GROUP 8
#define BLOCK 32
#define ROWS 4          /* rows of x that share one reading of the weights */
#define TASK_GROUPS 8
#define TASK_ROWS 64

/* The same numbers as in quantized.py. */
enum { Q4_0, Q4_1, Q8_0 };

typedef struct {
    int8_t *codes; /* [rows, columns] */
    float *scales; /* [rows, blocks] */
    float *sums;   /* [rows, blocks], of what the codes stand for */
    long blocks;
} Rounded;

INLINE long head_bytes(int kind) { return kind == Q4_1 ? 4 * GROUP : 2 * GROUP; }
INLINE long block_bytes(int kind) { return head_bytes(kind) + (kind == Q8_0 ? BLOCK : BLOCK / 2) * GROUP; }

static void round_row(const float *x, const Rounded *into, long row)
{
    const float shift = 12582912.0f; /* as in exp_lanes */
    for (long b = 0; b < into->blocks; b++, x += BLOCK) {
        int8_t *codes = into->codes + (row * into->blocks + b) * BLOCK;
        vf most = {0}, bad = {0}; /* bad: 0, or NaN if x is not finite */
        vi sum = {0};
        for (int i = 0; i < BLOCK; i += LANES) {
            vf at = load(x + i), size = (vf)((vi)at & 0x7fffffff);
            most = pick(size > most, size, most);
            bad += at * 0.0f;
        }
        float top = lanes_max(most), inverse = top > 0 ? 127 / top : 0;
        for (int i = 0; i < BLOCK; i += LANES) {
            vi code = (vi)(load(x + i) * inverse + shift) - (vi)splat(shift);
            sum += code;
            for (int j = 0; j < LANES; j++)
                codes[i + j] = (int8_t)code[j];
        }
        int32_t total = 0;
        for (int j = 0; j < LANES; j++)
            total += sum[j];
        float scale = top / 127 + lanes_sum(bad);
        into->scales[row * into->blocks + b] = scale;
        into->sums[row * into->blocks + b] = scale * (float)total;
    }
}

#if defined(__ARM_FEATURE_DOTPROD)

INLINE float32x4_t halves(const uint8_t *at) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(at))); }

/* `count` rows of x, from `row` on, times one group. */
INLINE void times_group(int kind, int count, const uint8_t *weight, const Rounded *x, long row, float out[ROWS][GROUP])
{
    float32x4_t sums[ROWS][2];
    for (int r = 0; r < count; r++)
        sums[r][0] = sums[r][1] = vdupq_n_f32(0);
    for (long b = 0; b < x->blocks; b++, weight += block_bytes(kind))
        for (int half = 0; half < 2; half++) {
            const uint8_t *codes = weight + head_bytes(kind) + 16 * half;
            float32x4_t scale = halves(weight + 8 * half), low = scale;
            int8x16_t w[8];
            if (kind == Q8_0)
                for (int i = 0; i < 8; i++)
                    w[i] = vld1q_s8((const int8_t *)codes + 32 * i);
            else {
                low = kind == Q4_1 ? halves(weight + 2 * GROUP + 8 * half) : vmulq_n_f32(scale, -8);
                for (int i = 0; i < 4; i++) {
                    uint8x16_t both = vld1q_u8(codes + 32 * i);
                    w[i] = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
                    w[i + 4] = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
                }
            }
            for (int r = 0; r < count; r++) {
                long at = (row + r) * x->blocks + b;
                int8x16_t left = vld1q_s8(x->codes + at * BLOCK), right = vld1q_s8(x->codes + at * BLOCK + 16);
                int32x4_t one = vdupq_n_s32(0), two = vdupq_n_s32(0);
                one = vdotq_laneq_s32(one, w[0], left, 0);
                two = vdotq_laneq_s32(two, w[4], right, 0);
                one = vdotq_laneq_s32(one, w[1], left, 1);
                two = vdotq_laneq_s32(two, w[5], right, 1);
                one = vdotq_laneq_s32(one, w[2], left, 2);
                two = vdotq_laneq_s32(two, w[6], right, 2);
                one = vdotq_laneq_s32(one, w[3], left, 3);
                two = vdotq_laneq_s32(two, w[7], right, 3);
                float32x4_t product = vmulq_f32(vcvtq_f32_s32(vaddq_s32(one, two)), scale);
                sums[r][half] = vfmaq_n_f32(sums[r][half], product, x->scales[at]);
                if (kind != Q8_0)
                    sums[r][half] = vfmaq_n_f32(sums[r][half], low, x->sums[at]);
            }
        }
    for (int r = 0; r < count; r++) {
        vst1q_f32(out[r], sums[r][0]);
        vst1q_f32(out[r] + 4, sums[r][1]);
    }
}

#elif defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)

INLINE __m256 halves(const uint8_t *at) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at)); }

INLINE __m256i four_codes(const int8_t *at)
{
    int32_t codes;
    memcpy(&codes, at, 4);
    return _mm256_set1_epi32(codes);
}

INLINE void times_group(int kind, int count, const uint8_t *weight, const Rounded *x, long row, float out[ROWS][GROUP])
{
    const __m256i ones = _mm256_set1_epi16(1), low_half = _mm256_set1_epi8(15);
    __m256 sums[ROWS];
    for (int r = 0; r < count; r++)
        sums[r] = _mm256_setzero_ps();
    for (long b = 0; b < x->blocks; b++, weight += block_bytes(kind)) {
        const uint8_t *codes = weight + head_bytes(kind);
        __m256 scale = halves(weight), low = scale;
        __m256i total[ROWS];
        for (int r = 0; r < count; r++)
            total[r] = _mm256_setzero_si256();
        if (kind != Q8_0)
            low = kind == Q4_1 ? halves(weight + 2 * GROUP) : _mm256_mul_ps(scale, _mm256_set1_ps(-8));
        for (int i = 0; i < (kind == Q8_0 ? 8 : 4); i++) {
            __m256i both = _mm256_loadu_si256((const __m256i *)(codes + 32 * i));
            __m256i left = kind == Q8_0 ? _mm256_abs_epi8(both) : _mm256_and_si256(both, low_half);
            __m256i right = _mm256_and_si256(_mm256_srli_epi16(both, 4), low_half);
            for (int r = 0; r < count; r++) {
                const int8_t *at = x->codes + ((row + r) * x->blocks + b) * BLOCK + 4 * i;
                if (kind == Q8_0) {
                    __m256i pairs = _mm256_maddubs_epi16(left, _mm256_sign_epi8(four_codes(at), both));
                    total[r] = _mm256_add_epi32(total[r], _mm256_madd_epi16(pairs, ones));
                } else { /* 8 sums of two products up to 15 * 127 fit in 16 bits */
                    __m256i pairs = _mm256_maddubs_epi16(left, four_codes(at));
                    pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(right, four_codes(at + 16)));
                    total[r] = _mm256_add_epi16(total[r], pairs);
                }
            }
        }
        for (int r = 0; r < count; r++) {
            long at = (row + r) * x->blocks + b;
            __m256i whole = kind == Q8_0 ? total[r] : _mm256_madd_epi16(total[r], ones);
            __m256 product = _mm256_mul_ps(_mm256_cvtepi32_ps(whole), scale);
            sums[r] = _mm256_fmadd_ps(product, _mm256_set1_ps(x->scales[at]), sums[r]);
            if (kind != Q8_0)
                sums[r] = _mm256_fmadd_ps(low, _mm256_set1_ps(x->sums[at]), sums[r]);
        }
    }
    for (int r = 0; r < count; r++)
        _mm256_storeu_ps(out[r], sums[r]);
}

#else

static float half(const uint8_t *at)
{
    uint32_t bits = (uint32_t)at[0] | (uint32_t)at[1] << 8, size = bits & 0x7fff;
    float sign = bits >> 15 ? -1.0f : 1.0f;
    if (size < 0x400) /* below the normal numbers */
        return sign * (float)size / 16777216.0f;
    if (size >= 0x7c00)
        return size == 0x7c00 ? sign * INFINITY : NAN;
    uint32_t wide = (size + (112 << 10)) << 13;
    float value;
    memcpy(&value, &wide, 4);
    return sign * value;
}

INLINE void times_group(int kind, int count, const uint8_t *weight, const Rounded *x, long row, float out[ROWS][GROUP])
{
    for (int r = 0; r < count; r++)
        memset(out[r], 0, GROUP * sizeof(float));
    for (long b = 0; b < x->blocks; b++, weight += block_bytes(kind)) {
        const uint8_t *codes = weight + head_bytes(kind);
        for (int g = 0; g < GROUP; g++) {
            float scale = half(weight + 2 * g);
            float low = kind == Q4_1 ? half(weight + 2 * GROUP + 2 * g) : -8 * scale;
            for (int r = 0; r < count; r++) {
                long at = (row + r) * x->blocks + b;
                const int8_t *mine = x->codes + at * BLOCK;
                int32_t total = 0;
                for (int i = 0; i < (kind == Q8_0 ? 32 : 16); i++) {
                    uint8_t code = codes[i / 4 * 32 + g * 4 + i % 4];
                    total += kind == Q8_0 ? (int8_t)code * mine[i] : (code & 15) * mine[i] + (code >> 4) * mine[i + 16];
                }
                out[r][g] += (float)total * scale * x->scales[at];
                if (kind != Q8_0)
                    out[r][g] += low * x->sums[at];
            }
        }
    }
}

#endif

INLINE void times(int kind, const uint8_t *weight, const Rounded *x, long row, long rows, float out[ROWS][GROUP])
{
    switch (rows) {
    case 4: times_group(kind, 4, weight, x, row, out); break;
    case 3: times_group(kind, 3, weight, x, row, out); break;
    case 2: times_group(kind, 2, weight, x, row, out); break;
    default: times_group(kind, 1, weight, x, row, out);
    }
}

/* Rows [row, row_end) of x times groups [group, group_end). */
INLINE void run_task(int kind, float *out, const uint8_t *weight, const Rounded *x, long row, long row_end, long group,
                     long group_end, long size_out)
{
    float part[ROWS][GROUP];
    for (; group < group_end; group++) {
        const uint8_t *from = weight + group * x->blocks * block_bytes(kind);
        for (long r = row; r < row_end; r += ROWS) {
            long rows = row_end - r < ROWS ? row_end - r : ROWS;
            times(kind, from, x, r, rows, part);
            for (long i = 0; i < rows; i++)
                memcpy(out + (r + i) * size_out + group * GROUP, part[i], sizeof part[i]);
        }
    }
}

/* x is [rows, size_in], out [rows, size_out], both float and contiguous; size_out is a multiple of GROUP. */
int quire_linear(float *out, const float *x, const uint8_t *weight, int64_t num_rows, int64_t size_in, int64_t size_out,
                 int32_t kind, int32_t num_threads)
{
    long blocks = size_in / BLOCK, groups = size_out / GROUP;
    long group_tasks = (groups + TASK_GROUPS - 1) / TASK_GROUPS, row_tasks = (num_rows + TASK_ROWS - 1) / TASK_ROWS;
    float *memory = malloc((size_t)(num_rows * blocks) * (2 * sizeof(float) + BLOCK));
    if (!memory)
        return 1;
    Rounded rounded = {(int8_t *)(memory + 2 * num_rows * blocks), memory, memory + num_rows * blocks, blocks};
    if (num_rows == 1)
        round_row(x, &rounded, 0);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        if (num_rows > 1) {
#pragma omp for schedule(static)
            for (long row = 0; row < num_rows; row++)
                round_row(x + row * size_in, &rounded, row);
        }
#pragma omp for schedule(dynamic, 1)
        for (long task = 0; task < group_tasks * row_tasks; task++) {
            long group = task / row_tasks * TASK_GROUPS, row = task % row_tasks * TASK_ROWS;
            long group_end = group + TASK_GROUPS < groups ? group + TASK_GROUPS : groups;
            long row_end = row + TASK_ROWS < num_rows ? row + TASK_ROWS : num_rows;
            switch (kind) {
            case Q4_0: run_task(Q4_0, out, weight, &rounded, row, row_end, group, group_end, size_out); break;
            case Q4_1: run_task(Q4_1, out, weight, &rounded, row, row_end, group, group_end, size_out); break;
            default: run_task(Q8_0, out, weight, &rounded, row, row_end, group, group_end, size_out);
            }
        }
    }
    free(memory);
    return 0;
}
