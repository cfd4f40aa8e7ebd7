/* Integer GEMM with interleaved packed weights: sums of two int16 products, GROUP rows of the weight at a time.
 *
 * x is quantized to 16 bits with a scale per 32 columns. The result of a row of x depends neither on the other rows nor on the
 * division of the work: integer sums are exact, and the float operations after them are always the same.
 *
 * The peak of a core with two 512-bit vector units, in multiply-adds per cycle, is 64 with vpdpwssd and 32 with vpmaddwd and
 * vpaddd (like FMA). The four instructions that scale the sum of each block of 32 columns leave 8/9 of that, 28.4. vpmaddubsw and
 * vpaddw would reach 64 with 8-bit x, which is too coarse, and 32 with two planes of x. A tile of 12 rows and 32 outputs reads
 * 64 * 2 bytes of codes and 12 * 4 bytes of x for its 24 * 32 products.
 */
#include "matrix.h"

#ifdef DOT_X86

#define MOST 32767   /* largest code of x */
#define PAIRS 16     /* pairs of columns in a block: (4i, 4i + 2) is pair 2i, (4i + 1, 4i + 3) pair 2i + 1 */
#define CHUNK 8      /* blocks of a weight that are unpacked at a time, so that they stay in the L1 cache */
#define FEW (PANEL - 1) /* maximum rows of x that are multiplied directly from the packed weights */
#define WIDTH (UNIT_GROUPS * GROUP)
#define AHEAD 1536   /* prefetch distance in bytes */

#if GROUP == 16
typedef __m512i ints;
typedef __m512 reals;
typedef __m256i halves;
#define OP(name) _mm512_##name
#define PANELS 3 /* panels of x per tile: 24 sums in 32 registers */
#else
typedef __m256i ints;
typedef __m256 reals;
typedef __m128i halves;
#define OP(name) _mm256_##name
#define PANELS 1 /* 8 sums in 16 registers */
#endif

typedef ints ints_any __attribute__((aligned(1), may_alias));
typedef halves halves_any __attribute__((aligned(1), may_alias));

/* Sums stay in registers only if all loops over them are unrolled. */
#define UNROLL _Pragma("GCC unroll 16")
#define KEEP_LOOP _Pragma("GCC unroll 1")
/* Compiler barrier for memory: otherwise the compiler would keep more sums in registers than there are. */
#define STAY asm volatile("" ::: "memory")

INLINE ints same(int32_t x) { return OP(set1_epi32)(x); }

/* Sum of two int16 products per lane. The asm keeps its position, since a compiler that moves it runs out of registers. */
INLINE ints pairs(ints a, ints b)
{
    ints sum;
    asm volatile("vpmaddwd %2, %1, %0" : "=v"(sum) : "v"(a), "v"(b));
    return sum;
}

/* `pairs`, added to `sum`. */
INLINE ints plus_pairs(ints sum, ints a, ints b)
{
#if defined(__AVX512VNNI__) && (GROUP == 16 || defined(__AVX512VL__))
    asm volatile("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#elif GROUP == 8 && defined(__AVXVNNI__)
    asm volatile("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
#elif GROUP == 16
    asm volatile("vpmaddwd %2, %1, %%zmm31\n\tvpaddd %%zmm31, %0, %0" : "+v"(sum) : "v"(a), "v"(b) : "xmm31");
#else
    asm volatile("vpmaddwd %2, %1, %%ymm15\n\tvpaddd %%ymm15, %0, %0" : "+x"(sum) : "x"(a), "x"(b) : "xmm15");
#endif
    return sum;
}

INLINE float lanes_most(__m256 x)
{
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

/* 32 columns of a row of x: 16 pairs of codes; the scale, and the sums of all 32, of the first 16 and of the last 16 columns. */
typedef struct {
    __m256i codes[2];
    __m128 head;
} Rounded;

INLINE Rounded round_block(const float *x)
{
    Rounded made;
    __m256 most = _mm256_setzero_ps(), bad = most; /* bad: 0, or NaN if x is not finite */
    __m256i sums[2];
    for (int i = 0; i < BLOCK; i += 8) {
        __m256 at = _mm256_loadu_ps(x + i);
        most = _mm256_max_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), at), most);
        bad = _mm256_fmadd_ps(at, _mm256_setzero_ps(), bad);
    }
    float top = lanes_most(most), inverse = top > 1e-30f ? MOST / top : 0;
    for (int i = 0; i < 2; i++) {
        __m256i one = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 16 * i), _mm256_set1_ps(inverse)));
        __m256i two = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 16 * i + 8), _mm256_set1_ps(inverse)));
        __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(one, two), 0xd8);
        sums[i] = _mm256_madd_epi16(both, _mm256_set1_epi16(1));
        made.codes[i] = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(both, 0xd8), 0xd8);
    }
    __m256i pairs = _mm256_hadd_epi32(sums[0], sums[1]);
    __m128i halves = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    halves = _mm_hadd_epi32(halves, halves); /* left, right, left, right */
    __m128i whole = _mm_hadd_epi32(halves, halves);
    int is_bad = _mm256_movemask_ps(_mm256_cmp_ps(bad, bad, _CMP_UNORD_Q));
    __m128 scale = _mm_set1_ps(is_bad ? __builtin_nanf("") : top * (1.0f / MOST));
    made.head = _mm_mul_ps(scale, _mm_cvtepi32_ps(_mm_blend_epi32(whole, halves, 12)));
    made.head = _mm_blend_ps(made.head, scale, 1);
    return made;
}

/* Store the 20 values of a block with a stride of `lanes` * 4 bytes. */
void quire_round_row(const float *x, long blocks, long lanes, uint8_t *into)
{
    for (long b = 0; b < blocks; b++, x += BLOCK, into += lanes * ROUNDED_BYTES) {
        Rounded made = round_block(x);
        for (int i = 0; i < ROUNDED_BYTES / 4; i++)
            memcpy(into + 4 * lanes * i, (const uint8_t *)&made + 4 * i, 4);
    }
}

/* Quantize the rows of a panel at once. */
void quire_round_panel(const float *const *x, long blocks, uint8_t *into)
{
    for (long b = 0; b < blocks; b++, into += PANEL * ROUNDED_BYTES) {
        Rounded made[PANEL];
        for (int r = 0; r < PANEL; r++)
            made[r] = round_block(x[r] + b * BLOCK);
        for (int i = 0; i < 2; i++) {
            __m256i low[2], high[2], by_pair[4]; /* by_pair[j]: pairs j and j + 4 of all rows */
            for (int r = 0; r < 2; r++) {
                low[r] = _mm256_unpacklo_epi32(made[2 * r].codes[i], made[2 * r + 1].codes[i]);
                high[r] = _mm256_unpackhi_epi32(made[2 * r].codes[i], made[2 * r + 1].codes[i]);
            }
            by_pair[0] = _mm256_unpacklo_epi64(low[0], low[1]), by_pair[1] = _mm256_unpackhi_epi64(low[0], low[1]);
            by_pair[2] = _mm256_unpacklo_epi64(high[0], high[1]), by_pair[3] = _mm256_unpackhi_epi64(high[0], high[1]);
            for (int j = 0; j < 4; j++) {
                _mm_storeu_si128((__m128i *)into + 8 * i + j, _mm256_castsi256_si128(by_pair[j]));
                _mm_storeu_si128((__m128i *)into + 8 * i + j + 4, _mm256_extracti128_si256(by_pair[j], 1));
            }
        }
        _MM_TRANSPOSE4_PS(made[0].head, made[1].head, made[2].head, made[3].head);
        for (int i = 0; i < 4; i++)
            _mm_storeu_ps((float *)into + 4 * (PAIRS + i), made[i].head);
    }
}

/* 32 unpacked columns of a group of the weight. */
typedef struct {
    ints codes[PAIRS];
    reals scale[2], low[2];
} Ready;

INLINE reals group_heads(int form, const uint8_t *at)
{
    if (has_halves(form))
        return OP(cvtph_ps)(*(const halves_any *)at);
    if (form == E2M1) { /* half_power */
        ints bytes = OP(cvtepu8_epi32)(_mm_loadu_si128((const __m128i *)at));
        ints power = OP(slli_epi32)(OP(sub_epi32)(OP(max_epi32)(bytes, same(1)), same(1)), 23);
        ints low = OP(sllv_epi32)(same(0x00200000), bytes); /* 0 from 11 on */
        return (reals)OP(max_epi32)(power, OP(min_epi32)(low, same(0x00400000)));
    }
    return OP(loadu_ps)((const float *)at);
}

/* Number that is added to the values of 4-bit codes (or of their table), so that the integer factors are not negative. */
INLINE int offset_of(int form)
{
    switch (form) {
    case E2M1: case E2M1_F_16: return 12;
    case IQ2_F_16: return 43;
    case IQ3_F: return 62;
    case IQ4_F: return 127;
    default: return 8;
    }
}

/* Read the scales and lows of a block. */
INLINE void read_heads(int form, const uint8_t *weight, reals *scale, reals *low)
{
    long each = heads_of(form), bytes = GROUP * head_bytes(form);
    for (int i = 0; i < each; i++) {
        scale[i] = group_heads(form, weight + i * bytes);
        if (has_low(form))
            low[i] = group_heads(form, weight + (each + i) * bytes);
        else
            low[i] = is_four(form) ? OP(mul_ps)(scale[i], OP(set1_ps)((float)-offset_of(form))) : OP(setzero_ps)();
    }
}

/* Convert 4-bit codes in the low bits of int16, with other bits ignored, to the integer factors. */
INLINE ints codes_of(int form, ints at)
{
    if (!has_table(form))
        return at & same(0x000f000f);
    /* Bytes of values and the offset are not negative; index 0x80 gives 0. */
    const __m128i table = _mm_add_epi8(_mm_loadu_si128((const __m128i *)table_of(form)), _mm_set1_epi8((char)offset_of(form)));
#if GROUP == 16
    ints of = _mm512_broadcast_i32x4(table);
#else
    ints of = _mm256_broadcastsi128_si256(table);
#endif
    return OP(shuffle_epi8)(of, (at & same(0x000f000f)) | same((int32_t)0x80008000));
}

/* Unpack block `b` of a group. */
INLINE void make_ready(int form, long shift, const uint8_t *group, long b, Ready *into)
{
    const uint8_t *codes = group + codes_at(form, shift, b);
    read_heads(form, group + heads_at(form, shift, b), into->scale, into->low);
    for (int i = 0; i < code_bytes(form) / 4; i++) {
        ints at = *(const ints_any *)(codes + 4 * GROUP * i);
        if (is_four(form)) {
            into->codes[2 * i] = codes_of(form, at);
            into->codes[2 * i + 1] = codes_of(form, OP(srli_epi16)(at, 8));
            into->codes[2 * i + 8] = codes_of(form, OP(srli_epi16)(at, 4));
            into->codes[2 * i + 9] = has_table(form) ? codes_of(form, OP(srli_epi16)(at, 12)) : OP(srli_epi16)(at, 12);
        } else {
            into->codes[2 * i] = OP(srai_epi16)(OP(slli_epi16)(at, 8), 8);
            into->codes[2 * i + 1] = OP(srai_epi16)(at, 8);
        }
    }
}

/* Scale the integer sums `dots` of the columns of one head by that head and the scales of x. */
INLINE reals plus_scaled(reals sum, ints dots, reals scale, reals low, float x_scale, float x_sum)
{
    sum = OP(fmadd_ps)(low, OP(set1_ps)(x_sum), sum);
    return OP(fmadd_ps)(OP(mul_ps)(OP(cvtepi32_ps)(dots), scale), OP(set1_ps)(x_scale), sum);
}

/* The two halves of a block of a group times those of `count` rows of x. 4-bit codes are masked in place and their sums shifted
 * down; multiplied by 256 they stay below 2^30. */
INLINE void dot_halves(int form, int count, const uint8_t *codes, const int32_t *const *x, ints dots[][2])
{
    ints sums[FEW][4];
    UNROLL
    for (int i = 0; i < code_bytes(form) / 4; i++) {
        ints at = *(const ints_any *)(codes + 4 * GROUP * i), part[4];
        int parts = is_four(form) ? 4 : 2, to = is_four(form) ? 0 : i / 4 * 2;
        if (has_table(form)) {
            for (int p = 0; p < 4; p++)
                part[p] = codes_of(form, OP(srli_epi16)(at, (unsigned)(p % 2 * 8 + p / 2 * 4)));
        } else if (is_four(form)) {
            part[0] = at & same(0x000f000f);
            part[1] = at & same(0x0f000f00);
            part[2] = at & same(0x00f000f0);
            part[3] = OP(srli_epi16)(at, 12);
        } else {
            part[0] = OP(srai_epi16)(OP(slli_epi16)(at, 8), 8);
            part[1] = OP(srai_epi16)(at, 8);
        }
        UNROLL
        for (int r = 0; r < count; r++)
            for (int p = 0; p < parts; p++) {
                ints with = same(x[r][2 * i + p % 2 + p / 2 * 8]);
                int is_first = i % (is_four(form) ? 8 : 4) == 0;
                sums[r][to + p] = is_first ? pairs(part[p], with) : plus_pairs(sums[r][to + p], part[p], with);
            }
    }
    UNROLL
    for (int r = 0; r < count; r++) {
        int in_place = is_four(form) && !has_table(form);
        ints second = in_place ? OP(srai_epi32)(sums[r][1], 8) : sums[r][1];
        ints third = in_place ? OP(srai_epi32)(sums[r][2], 4) : sums[r][2];
        dots[r][0] = OP(add_epi32)(sums[r][0], second);
        dots[r][1] = OP(add_epi32)(third, sums[r][3]);
    }
}

/* Prefetch a block. */
INLINE void fetch(int form, const uint8_t *weight)
{
    for (long i = 0; i < GROUP * block_bytes(form); i += 64)
        __builtin_prefetch(weight + i);
}

/* Few rows of x times one group, directly from the packed weights. */
INLINE void times_few(int form, int count, long shift, const uint8_t *weight, const uint8_t *x, long blocks, float out[][WIDTH])
{
    reals sums[FEW], scale[2], low[2];
    const int32_t *codes_of[FEW];
    UNROLL
    for (int r = 0; r < count; r++)
        sums[r] = OP(setzero_ps)();
    for (long b = 0; b < blocks; b++, weight += GROUP * code_bytes(form), x += ROUNDED_BYTES) {
        ints dots[FEW][2];
        fetch(form, weight + AHEAD);
        if (!(b & ((1 << shift) - 1))) {
            read_heads(form, weight, scale, low);
            weight += GROUP * heads_bytes(form);
        }
        for (int r = 0; r < count; r++)
            codes_of[r] = (const int32_t *)(x + r * blocks * ROUNDED_BYTES);
        dot_halves(form, count, weight, codes_of, dots);
        UNROLL
        for (int r = 0; r < count; r++) {
            const float *head = (const float *)(codes_of[r] + PAIRS);
            if (heads_of(form) == 1)
                sums[r] = plus_scaled(sums[r], OP(add_epi32)(dots[r][0], dots[r][1]), scale[0], low[0], head[0], head[1]);
            else
                for (int h = 0; h < 2; h++)
                    sums[r] = plus_scaled(sums[r], dots[r][h], scale[h], low[h], head[0], head[2 + h]);
        }
    }
    UNROLL
    for (int r = 0; r < count; r++)
        OP(storeu_ps)(out[r], sums[r]);
}

/* out += `panels` panels of x with a stride of `apart` bytes times `num` blocks of two groups. */
INLINE void times_tile(int heads, int panels, const Ready (*ready)[2], const uint8_t *x, long apart, long num, float out[][WIDTH])
{
    for (long b = 0; b < num; b++, x += PANEL * ROUNDED_BYTES)
        for (int h = 0; h < heads; h++) {
            ints sums[PANELS * PANEL][2];
            int first = h * PAIRS / heads;
            UNROLL
            for (int r = 0; r < PANEL * panels; r++) {
                ints at = same(((const int32_t *)(x + r / PANEL * apart))[PANEL * first + r % PANEL]);
                sums[r][0] = pairs(ready[b][0].codes[first], at);
                sums[r][1] = pairs(ready[b][1].codes[first], at);
            }
            KEEP_LOOP
            for (int i = first + 1; i < first + PAIRS / heads; i++) {
                ints left = ready[b][0].codes[i], right = ready[b][1].codes[i];
                UNROLL
                for (int r = 0; r < PANEL * panels; r++) {
                    ints at = same(((const int32_t *)(x + r / PANEL * apart))[PANEL * i + r % PANEL]);
                    sums[r][0] = plus_pairs(sums[r][0], left, at);
                    sums[r][1] = plus_pairs(sums[r][1], right, at);
                }
            }
            UNROLL
            for (int r = 0; r < PANEL * panels; r++) {
                const float *head = (const float *)(x + r / PANEL * apart) + PANEL * PAIRS + r % PANEL;
                for (int g = 0; g < 2; g++) {
                    const Ready *with = &ready[b][g];
                    float x_sum = head[PANEL * (heads == 1 ? 1 : 2 + h)], *to = out[r] + g * GROUP;
                    reals sum = plus_scaled(OP(loadu_ps)(to), sums[r][g], with->scale[h], with->low[h], head[0], x_sum);
                    OP(storeu_ps)(to, sum);
                }
            }
            STAY;
        }
}

INLINE void times_panels(int heads, long panels, const Ready (*ready)[2], const uint8_t *x, long apart, long num,
                         float out[][WIDTH])
{
    for (long take; panels; panels -= take, x += take * apart, out += take * PANEL) {
        take = PANELS == 1 || panels == 1 ? 1 : panels == 2 || panels == 4 ? 2 : 3; /* 2 + 2 is faster than 3 + 1 */
        if (take == 1)
            times_tile(heads, 1, ready, x, apart, num, out);
#if PANELS > 1
        else if (take == 2)
            times_tile(heads, 2, ready, x, apart, num, out);
        else
            times_tile(heads, 3, ready, x, apart, num, out);
#endif
    }
}

/* `times_panels`, compiled for formats with one and with two heads (scales) per block. */
static void times_ready(int heads, long panels, const Ready (*ready)[2], const uint8_t *x, long apart, long num, float out[][WIDTH])
{
    if (heads == 1)
        times_panels(1, panels, ready, x, apart, num, out);
    else
        times_panels(2, panels, ready, x, apart, num, out);
}

/* Many rows of x times a unit of the weight: its groups begin at `left` and `right`. */
INLINE void times_many(int form, long shift, long panels, const uint8_t *left, const uint8_t *right, const uint8_t *x, long blocks,
                       float out[][WIDTH])
{
    Ready ready[CHUNK][2];
    long apart = blocks * PANEL * ROUNDED_BYTES;
    long chunks = (blocks + CHUNK - 1) / CHUNK, each = (blocks + chunks - 1) / chunks;
    memset(out, 0, (size_t)(panels * PANEL) * sizeof *out);
    for (long start = 0; start < blocks; start += each) {
        long num = at_most(each, blocks - start), next = start + num < blocks ? start + num : UNIT_GROUPS * blocks;
        for (long b = 0; b < num; b++) {
            make_ready(form, shift, left, start + b, &ready[b][0]);
            make_ready(form, shift, right, start + b, &ready[b][1]);
            fetch(form, left + codes_at(form, shift, next + b) - GROUP * heads_bytes(form));
            fetch(form, right + codes_at(form, shift, next + b) - GROUP * heads_bytes(form));
        }
        times_ready(heads_of(form), panels, ready, x + start * PANEL * ROUNDED_BYTES, apart, num, out);
    }
}

INLINE void run_task(int form, const LinearJob *job, const Matrix *part, const uint8_t *x, long at, long row, long row_end,
                     long unit, long unit_end)
{
    float sums[DOT_ROWS][WIDTH];
    long blocks = part->columns / BLOCK, count = row_end - row, shift = shift_of(form, part);
    x += row * blocks * ROUNDED_BYTES;
    for (; unit < unit_end; unit++) {
        long first = unit * WIDTH, width = at_most(WIDTH, part->rows - first);
        const uint8_t *left = (const uint8_t *)part->data + heads_at(form, shift, unit * UNIT_GROUPS * blocks);
        const uint8_t *right = width > GROUP ? left + heads_at(form, shift, blocks) : left;
        if (job->num_rows >= PANEL)
            times_many(form, shift, (count + PANEL - 1) / PANEL, left, right, x, blocks, sums);
        else
            for (int g = 0; g < (width > GROUP ? 2 : 1); g++)
                switch (count) {
                case 1: times_few(form, 1, shift, g ? right : left, x, blocks, (float(*)[WIDTH])(sums[0] + g * GROUP)); break;
                case 2: times_few(form, 2, shift, g ? right : left, x, blocks, (float(*)[WIDTH])(sums[0] + g * GROUP)); break;
                default: times_few(form, 3, shift, g ? right : left, x, blocks, (float(*)[WIDTH])(sums[0] + g * GROUP));
                }
        for (long r = 0; r < count; r++) {
            long to = (row + r) * job->out_stride + at + first;
            for (long i = 0; job->bias && i < width; i++)
                sums[r][i] += job->bias[at + first + i];
            if (width == WIDTH && !job->out_bf16) /* a copy of fixed size is inlined */
                memcpy((float *)job->out + to, sums[r], sizeof sums[r]);
            else
                narrow(sums[r], job->out, (int)job->out_bf16, to, width);
        }
    }
}

void quire_dot_task(const LinearJob *job, const Matrix *part, const uint8_t *x, long at, long row, long row_end, long unit,
                    long unit_end)
{
    switch (part->form) {
    case FOUR_H: run_task(FOUR_H, job, part, x, at, row, row_end, unit, unit_end); break;
    case FOUR_LOW_H: run_task(FOUR_LOW_H, job, part, x, at, row, row_end, unit, unit_end); break;
    case EIGHT_H: run_task(EIGHT_H, job, part, x, at, row, row_end, unit, unit_end); break;
    case FOUR_LOW_F: run_task(FOUR_LOW_F, job, part, x, at, row, row_end, unit, unit_end); break;
    case EIGHT_LOW_F: run_task(EIGHT_LOW_F, job, part, x, at, row, row_end, unit, unit_end); break;
    case FOUR_LOW_F_16: run_task(FOUR_LOW_F_16, job, part, x, at, row, row_end, unit, unit_end); break;
    case E2M1: run_task(E2M1, job, part, x, at, row, row_end, unit, unit_end); break;
    case IQ2_F_16: run_task(IQ2_F_16, job, part, x, at, row, row_end, unit, unit_end); break;
    case IQ3_F: run_task(IQ3_F, job, part, x, at, row, row_end, unit, unit_end); break;
    case IQ4_F: run_task(IQ4_F, job, part, x, at, row, row_end, unit, unit_end); break;
    case E2M1_F_16: run_task(E2M1_F_16, job, part, x, at, row, row_end, unit, unit_end); break;
    default: run_task(EIGHT_F_16, job, part, x, at, row, row_end, unit, unit_end);
    }
}

#endif
