/* Few rows of x times interleaved packed weights, with NEON: for decode steps and for verifying draft tokens.
 *
 * A weight is read once and unpacked in registers for up to eight rows of x. The operations of a row and their order are those of
 * gguf.c, so the results are bitwise equal.
 */
#if defined(__aarch64__) && !defined(__clang__) && __GNUC__ >= 9
#pragma GCC target("tune=neoverse-n1") /* otherwise loads are placed right before their use, which is 10 % slower */
#endif
#include "matrix.h"

#ifdef DOT_NEON

#include "gguf_neon.h"

#define ROWS 8  /* maximum rows of x at once */
#define PAIRS 4 /* maximum rows for which both halves of a group fit in the registers */
#define EACH_ROW _Pragma("GCC unroll 8") for (int r = 0; r < count; r++)
#define EACH_HALF _Pragma("GCC unroll 2") for (int h = 0; h < halves; h++)

typedef struct {
    int32x4_t of[ROWS][2];
} Whole;

/* Add the products of 16 columns, from 16 * from on, with a plane of x to `sums`, which alternate to hide latency. */
INLINE void add_columns(int count, int halves, const Half *part, int from, const int8_t *plane, long apart, Whole *sums)
{
    int8x16_t codes[ROWS];
    EACH_ROW codes[r] = vld1q_s8(plane + r * apart + 16 * from);
    EACH_ROW EACH_HALF sums->of[r][h] = vdotq_laneq_s32(sums->of[r][h], part[h].codes[4 * from], codes[r], 0);
    EACH_ROW EACH_HALF sums->of[r][h] = vdotq_laneq_s32(sums->of[r][h], part[h].codes[4 * from + 1], codes[r], 1);
    EACH_ROW EACH_HALF sums->of[r][h] = vdotq_laneq_s32(sums->of[r][h], part[h].codes[4 * from + 2], codes[r], 2);
    EACH_ROW EACH_HALF sums->of[r][h] = vdotq_laneq_s32(sums->of[r][h], part[h].codes[4 * from + 3], codes[r], 3);
}

/* The high plane is summed first and shifted in place, then the low plane is added; the sum starts with MAGIC. */
INLINE Whole dots(int form, int count, int halves, const Half *part, const int8_t *x, long apart)
{
    static const vi magic = {MAGIC_BITS >> 6, MAGIC_BITS >> 6, MAGIC_BITS >> 6, MAGIC_BITS >> 6};
    Whole sums;
    EACH_ROW EACH_HALF sums.of[r][h] = is_small(form) ? (int32x4_t)fresh((const vf *)&magic) : vdupq_n_s32(0);
    add_columns(count, halves, part, 0, x, apart, &sums);
    add_columns(count, halves, part, 1, x, apart, &sums);
    EACH_ROW EACH_HALF sums.of[r][h] = vshlq_n_s32(sums.of[r][h], 6);
    add_columns(count, halves, part, 1, x + BLOCK, apart, &sums);
    add_columns(count, halves, part, 0, x + BLOCK, apart, &sums);
    return sums;
}

INLINE float32x4_t scaled(int form, const Half *part, int32x4_t sum)
{
    if (is_small(form))
        return vfmaq_f32(part->shift, vreinterpretq_f32_s32(sum), part->scale);
    return vmulq_f32(vcvtq_f32_s32(sum), part->scale);
}

/* `count` rows of x with a stride of `apart` bytes times `halves` half groups from `first` on. */
INLINE void times_halves(int form, int count, int first, int halves, const uint8_t *weight, const uint8_t *x, long apart,
                         long blocks, float out[][GROUP])
{
    float32x4_t sums[ROWS][2];
    long bytes = GROUP * block_bytes(form);
    EACH_ROW EACH_HALF sums[r][h] = vdupq_n_f32(0);
    for (; blocks > 0; blocks--, weight += bytes, x += ROUNDED_BYTES) {
        Half part[2];
        for (long i = 0; i < bytes; i += 64)
            __builtin_prefetch(weight + AHEAD + i);
        EACH_HALF read_half(form, weight, first + h, part + h);
        Whole whole = dots(form, count, halves, part, (const int8_t *)x, apart);
        EACH_ROW {
            float32x4_t head = vld1q_f32((const float *)(x + r * apart + 2 * BLOCK));
            EACH_HALF {
                if (is_four(form) || has_low(form))
                    sums[r][h] = vfmaq_laneq_f32(sums[r][h], part[h].low, head, 1);
                sums[r][h] = vfmaq_laneq_f32(sums[r][h], scaled(form, part + h, whole.of[r][h]), head, 0);
            }
        }
    }
    EACH_ROW EACH_HALF vst1q_f32(out[r] + 4 * (first + h), sums[r][h]);
}

/* `times_halves` for both halves of a group. */
INLINE void times_group(int form, int count, const uint8_t *weight, const uint8_t *x, long apart, long blocks, float out[][GROUP])
{
    int halves = count <= PAIRS ? 2 : 1;
    for (int first = 0; first < 2; first += halves)
        times_halves(form, count, first, halves, weight, x, apart, blocks, out);
}

/* One function per format and number of rows, since a single function would have 25 % worse register allocation. Common formats
 * have all numbers of rows, others fewer, to limit the compile time. */
typedef void Times(const uint8_t *weight, const uint8_t *x, long apart, long blocks, float out[][GROUP]);
#define TIMES(form, count)                                                                                                       \
    static __attribute__((noinline)) void times_##form##_##count(const uint8_t *weight, const uint8_t *x, long apart,            \
                                                                 long blocks, float out[][GROUP])                                \
    {                                                                                                                            \
        times_group(form, count, weight, x, apart, blocks, out);                                                                 \
    }
#define UP_TO_FOUR(form)                                                                                                         \
    TIMES(form, 1)                                                                                                               \
    TIMES(form, 2)                                                                                                               \
    TIMES(form, 3)                                                                                                               \
    TIMES(form, 4)
#define UP_TO_EIGHT(form)                                                                                                        \
    UP_TO_FOUR(form)                                                                                                             \
    TIMES(form, 5)                                                                                                               \
    TIMES(form, 6)                                                                                                               \
    TIMES(form, 7)                                                                                                               \
    TIMES(form, 8)
UP_TO_EIGHT(FOUR_LOW_H)
UP_TO_EIGHT(FOUR_LOW_F)
UP_TO_FOUR(FOUR_H)
UP_TO_FOUR(EIGHT_H)
UP_TO_FOUR(EIGHT_LOW_F)
UP_TO_FOUR(E2M1)
UP_TO_FOUR(IQ3_F)
UP_TO_FOUR(IQ4_F)

#define FOUR_OF(form) times_##form##_1, times_##form##_2, times_##form##_3, times_##form##_4
#define EIGHT_OF(form) FOUR_OF(form), times_##form##_5, times_##form##_6, times_##form##_7, times_##form##_8
static Times *const KERNELS[][ROWS] = {
    [FOUR_LOW_H] = {EIGHT_OF(FOUR_LOW_H)}, [FOUR_LOW_F] = {EIGHT_OF(FOUR_LOW_F)},   [FOUR_H] = {FOUR_OF(FOUR_H)},
    [EIGHT_H] = {FOUR_OF(EIGHT_H)},        [EIGHT_LOW_F] = {FOUR_OF(EIGHT_LOW_F)}, [E2M1] = {FOUR_OF(E2M1)},
    [IQ3_F] = {FOUR_OF(IQ3_F)},            [IQ4_F] = {FOUR_OF(IQ4_F)},
};

void quire_dot_few(const LinearJob *job, const Matrix *part, const uint8_t *x, long at, long row, long row_end, long group,
                   long group_end)
{
    int form = (int)part->form;
    Times *const *kernels = KERNELS[form];
    long blocks = part->columns / BLOCK, bytes = blocks * GROUP * block_bytes(form), apart = blocks * ROUNDED_BYTES;
    long most = kernels[ROWS - 1] ? ROWS : PAIRS;
    float sums[ROWS][GROUP];
    for (; group < group_end; group++)
        for (long first = row, count; first < row_end; first += count) {
            count = at_most(row_end - first, most);
            kernels[count - 1]((const uint8_t *)part->data + group * bytes, x + first * apart, apart, blocks, sums);
            for (long r = 0; r < count; r++)
                finish(job, part, sums[r], at, first + r, group * GROUP, GROUP);
        }
}

#endif
