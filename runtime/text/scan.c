#include "runtime/text/scan.h"

#include <stdbool.h>
#include <string.h>

#include "runtime/text/scan_block.h"
#include "runtime/text/unicode.h"

typedef const unsigned char *place;

#define CONTRACTIONS "'s|'t|'re|'ve|'m|'ll|'d"
#define LETTERS "[^\\r\\n\\p{L}\\p{N}]?\\p{L}+"
#define OTHERS " ?[^\\s\\p{L}\\p{N}]+"
#define SPACES "|\\s+(?!\\S)|\\s+"
#define CL100K(digits)                                                                             \
    "(?i:" CONTRACTIONS ")|" LETTERS "|" digits "|" OTHERS "[\\r\\n]*|\\s*[\\r\\n]+" SPACES
#define UPPER "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"

static const struct {
    scan_kind kind;
    const char *pattern;
} patterns[] = {
    {SCAN_GPT2, CONTRACTIONS "| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+" SPACES},
    {SCAN_GPT2, "'(?:[sdmt]|ll|ve|re)| ?\\p{L}++| ?\\p{N}++| ?[^\\s\\p{L}\\p{N}]++|\\s++$|"
                "\\s+(?!\\S)|\\s"},
    {SCAN_GPT2, "'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+" SPACES},
    {SCAN_LLAMA3, CL100K("\\p{N}{1,3}")},
    {SCAN_LLAMA3, "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}{1,3}|"
                  " ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+"},
    {SCAN_CL100K, "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}++|\\p{N}{1,3}+|"
                  " ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*+|\\s++$|\\s*[\\r\\n]|\\s+(?!\\S)|\\s"},
    {SCAN_QWEN2, CL100K("\\p{N}")},
    {SCAN_NUMBERS_2, "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}{1,2}|"
                     " ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+"},
    {SCAN_O200K, "[^\\r\\n\\p{L}\\p{N}]?" UPPER "*" LOWER "+(?i:" CONTRACTIONS ")?|"
                 "[^\\r\\n\\p{L}\\p{N}]?" UPPER "+" LOWER "*(?i:" CONTRACTIONS ")?|"
                 "\\p{N}{1,3}|" OTHERS "[\\r\\n/]*|\\s*[\\r\\n]+" SPACES},
    {SCAN_DEEPSEEK, "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|"
                    "[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*|"
                    "\\s*[\\r\\n]+" SPACES},
    {SCAN_NUMBER_TRIPLES, "\\p{N}{1,3}"},
    {SCAN_CJK, "[\xE4\xB8\x80-\xE9\xBE\xA5\xE3\x81\x80-\xE3\x82\x9F\xE3\x82\xA0-\xE3\x83\xBF]+"},
};

/* Line breaks count as written \r and \n. */
static bool same_pattern(const char *known, const char *given) {
    for (; *known; known++, given++) {
        if (known[0] == '\\' && (*given == '\r' || *given == '\n')) {
            if (known[1] != (*given == '\r' ? 'r' : 'n')) return false;
            known++;
        } else if (*known != *given) {
            return false;
        }
    }
    return !*given;
}

scan_kind scan_of_pattern(const char *pattern) {
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++)
        if (same_pattern(patterns[i].pattern, pattern)) return patterns[i].kind;
    return SCAN_NONE;
}

const char *scan_pattern(scan_kind kind, int n) {
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++)
        if (patterns[i].kind == kind && n-- == 0) return patterns[i].pattern;
    return NULL;
}

static inline unsigned class_at(place at, place end, int *length) {
    return unicode_class(unicode_read(at, end, length));
}

/* Where the characters end that have a class of `mask`, or none of it. */
static inline place run_in(place at, place end, unsigned mask) {
    int length;
    while (at < end) {
        unsigned class =
            *at < 0x80 ? (length = 1, unicode_classes[*at]) : class_at(at, end, &length);
        if (!(class & mask)) break;
        at += length;
    }
    return at;
}

static inline place run_out(place at, place end, unsigned mask) {
    int length;
    while (at < end) {
        unsigned class =
            *at < 0x80 ? (length = 1, unicode_classes[*at]) : class_at(at, end, &length);
        if (class & mask) break;
        at += length;
    }
    return at;
}

static inline bool is_ascii_letter(unsigned char c) {
    return (unsigned)((c | 0x20) - 'a') < 26;
}

/* Where the letters end: ASCII's by eights, without a branch a byte. */
static inline place letters(place at, place end) {
    const uint64_t each = 0x0101010101010101, high = each << 7;
    for (uint64_t eight, low, other; end - at >= 8; at += 8) {
        memcpy(&eight, at, 8);
        low = (eight | each * 0x20) & ~high;
        other = (~(low + each * (0x80 - 'a')) | (low + each * (0x7F - 'z')) | eight) & high;
        if (!other) continue;
        at += __builtin_ctzll(other) / 8;
        if (*at < 0x80) return at;
        break;
    }
    return run_in(at, end, TEXT_LETTER);
}

static inline bool is_break(unsigned char c) {
    return c == '\n' || c == '\r';
}

/* ASCII of [^\r\n\p{L}\p{N}], no letter: but ', which may begin a contraction. */
static inline bool may_precede(unsigned char c) {
    return c < 0x80 && (unsigned)(c - '0') > 9 && !is_break(c) && c != '\'';
}

/* (?i) folds U+017F to s. */
static inline int contraction(place at, place end, bool any_case) {
    if (end - at < 2 || *at != '\'') return 0;
    unsigned fold = any_case ? 0x20 : 0, a = at[1] | fold, b = end - at > 2 ? at[2] | fold : 0;
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return 3;
    return any_case && end - at > 2 && at[1] == 0xC5 && at[2] == 0xBF ? 3 : 0;
}

static inline place back_one(place at) {
    do at--;
    while ((*at & 0xC0) == 0x80);
    return at;
}

/* Where the spaces end; *broken is behind the last line break. */
static inline place spaces_end(place at, place end, place *broken) {
    const uint64_t blanks = 0x2020202020202020;
    for (uint64_t eight; at < end;) {
        if (end - at >= 8 && memcpy(&eight, at, 8) && eight == blanks) {
            at += 8;
            continue;
        }
        int length;
        if (!(class_at(at, end, &length) & TEXT_SPACE)) break;
        if (is_break(*at)) *broken = at + 1;
        at += length;
    }
    return at;
}

/* Of a run of spaces, all but the last, which belongs to what follows. */
static inline place spaces(place at, place end) {
    place broken, to = spaces_end(at, end, &broken);
    if (to == end) return to;
    place last = back_one(to);
    return last > at ? last : to;
}

/* The same, but up to the last line break where there is one. */
static inline place lines(place at, place end, bool tail) {
    place broken = at, to = spaces_end(at, end, &broken);
    if (tail && to == end) return to;
    if (broken > at || to == end) return broken > at ? broken : to;
    place last = back_one(to);
    return last > at ? last : to;
}

static inline place gpt2(place at, place end) {
    place letter = at + (*at == ' ');
    if (letter < end && is_ascii_letter(*letter)) return letters(letter + 1, end);
    if (*at == '\'') {
        int n = contraction(at, end, false);
        if (n) return at + n;
    }
    place from = at;
    int length;
    unsigned class = class_at(at, end, &length);
    if (*at == ' ' && at + 1 < end) {
        int next;
        unsigned following = class_at(at + 1, end, &next);
        if (!(following & TEXT_SPACE)) from++, class = following, length = next;
    }
    if (class & TEXT_LETTER) return letters(from + length, end);
    if (class & TEXT_NUMBER) return run_in(from + length, end, TEXT_NUMBER);
    if (class & TEXT_SPACE) return spaces(at, end);
    return run_out(from + length, end, TEXT_LETTER | TEXT_NUMBER | TEXT_SPACE);
}

static inline place numbers(place at, place end, int most) {
    for (int length; most > 0 && at < end; most--, at += length)
        if (!(class_at(at, end, &length) & TEXT_NUMBER)) break;
    return at;
}

/* " ?[^\s\p{L}\p{N}]+" and breaks, slashes too where `slash`; `at` where there is none. */
static inline place others(place at, place end, bool slash) {
    place from = *at == ' ' ? at + 1 : at;
    place to = run_out(from, end, TEXT_LETTER | TEXT_NUMBER | TEXT_SPACE);
    if (to == from) return at;
    while (to < end && (is_break(*to) || (slash && *to == '/'))) to++;
    return to;
}

static inline place cl100k(place at, place end, int digits, bool tail) {
    place letter = at + !is_ascii_letter(*at);
    if (letter < end && is_ascii_letter(*letter) && (letter == at || may_precede(*at)))
        return letters(letter + 1, end);
    if (*at == '\'') {
        int n = contraction(at, end, true);
        if (n) return at + n;
    }
    int length, next;
    unsigned class = class_at(at, end, &length);
    if (class & TEXT_LETTER) return letters(at + length, end);
    if (class & TEXT_NUMBER) return numbers(at, end, digits);
    if (!is_break(*at) && at + length < end && class_at(at + length, end, &next) & TEXT_LETTER)
        return letters(at + length + next, end);
    place to = others(at, end, false);
    return to > at ? to : lines(at, end, tail);
}

/* UPPER*LOWER+ from `at`, or `at`: where no lower-case letter follows, up to the last character
 * that counts as both. */
static place word_lower(place at, place end) {
    place upper = run_in(at, end, TEXT_UPPER), to = run_in(upper, end, TEXT_LOWER);
    if (to > upper) return to;
    for (place p = upper; p > at;) {
        int length;
        place before = back_one(p);
        if (class_at(before, end, &length) & TEXT_LOWER) return p;
        p = before;
    }
    return at;
}

static place o200k_word(place at, place end) {
    int length;
    unsigned class = class_at(at, end, &length);
    bool prefix = !(class & (TEXT_LETTER | TEXT_NUMBER)) && !is_break(*at);
    place after = at + length, to = at;
    if (prefix && after < end && (to = word_lower(after, end)) == after) to = at;
    if (to == at && class & (TEXT_UPPER | TEXT_LOWER)) to = word_lower(at, end);
    if (to == at && prefix && after < end && (to = run_in(after, end, TEXT_UPPER)) == after)
        to = at;
    if (to == at) to = run_in(at, end, TEXT_UPPER);
    return to > at ? to + contraction(to, end, true) : at;
}

static inline place o200k(place at, place end) {
    int length;
    place to = o200k_word(at, end);
    if (to > at) return to;
    if (class_at(at, end, &length) & TEXT_NUMBER) return numbers(at, end, 3);
    to = others(at, end, true);
    return to > at ? to : lines(at, end, false);
}

/* A match at `at`, or `at`. */
static inline place deepseek(place at, place end) {
    int length;
    unsigned class = class_at(at, end, &length), next = 0;
    place after = at + length;
    if (*at < 0x80 && class & (TEXT_PUNCT | TEXT_SYMBOL) && after < end &&
        is_ascii_letter(*after)) {
        while (after < end && is_ascii_letter(*after)) after++;
        return after;
    }
    if (class & (TEXT_LETTER | TEXT_MARK)) return run_in(after, end, TEXT_LETTER | TEXT_MARK);
    if (!(class & (TEXT_PUNCT | TEXT_SYMBOL)) && !is_break(*at) && after < end) {
        place to = run_in(after, end, TEXT_LETTER | TEXT_MARK);
        if (to > after) return to;
        next = class_at(after, end, &length);
    }
    if (class & (TEXT_PUNCT | TEXT_SYMBOL) || (*at == ' ' && next & (TEXT_PUNCT | TEXT_SYMBOL))) {
        after = run_in(after, end, TEXT_PUNCT | TEXT_SYMBOL);
        while (after < end && is_break(*after)) after++;
        return after;
    }
    return class & TEXT_SPACE ? lines(at, end, false) : at;
}

static inline bool is_cjk(uint32_t c) {
    return (c >= 0x4E00 && c <= 0x9FA5) || (c >= 0x3040 && c <= 0x30FF);
}

static inline place cjk(place at, place end) {
    int length;
    while (at < end && is_cjk(unicode_read(at, end, &length))) at += length;
    return at;
}

static inline place next_match(scan_kind kind, place at, place end) {
    switch (kind) {
    case SCAN_GPT2: return gpt2(at, end);
    case SCAN_LLAMA3: return cl100k(at, end, 3, false);
    case SCAN_CL100K: return cl100k(at, end, 3, true);
    case SCAN_QWEN2: return cl100k(at, end, 1, false);
    case SCAN_NUMBERS_2: return cl100k(at, end, 2, false);
    case SCAN_O200K: return o200k(at, end);
    case SCAN_DEEPSEEK: return deepseek(at, end);
    case SCAN_NUMBER_TRIPLES: return numbers(at, end, 3);
    case SCAN_CJK: return cjk(at, end);
    case SCAN_NONE:
    case SCAN_COUNT: break;
    }
    return end;
}

static inline int each_end(scan_kind kind, place *from, place end, place ends[SCAN_MOST]) {
    place at = *from, gap = at; /* where what matches nothing begins */
    int count = 0;
    while (at < end && count < SCAN_MOST - 1) {
        place to = next_match(kind, at, end);
        if (to == at) {
            int length;
            unicode_read(at, end, &length);
            at += length;
            continue;
        }
        if (gap < at) ends[count++] = at;
        ends[count++] = gap = at = to;
    }
    if (gap < at) ends[count++] = at;
    *from = at;
    return count;
}

static inline bool begins_ascii(place at) {
    uint64_t eight;
    memcpy(&eight, at, 8);
    return !(eight & 0x8080808080808080);
}

static inline uint64_t block(scan_kind kind, place at) {
    if (kind == SCAN_GPT2) return scan_block_gpt2(at);
    if (kind == SCAN_O200K) return scan_block_o200k(at);
    return scan_block_cl100k(at, kind == SCAN_QWEN2 ? 1 : kind == SCAN_NUMBERS_2 ? 2 : 3);
}

/* Of a pattern that scan_block.h has, which leaves no gaps: what a block does not decide piece by
 * piece. */
static inline int each_block_end(scan_kind kind, place *from, place end, place ends[SCAN_MOST]) {
    place at = *from;
    int count = 0;
    while (at < end && count <= SCAN_MOST - SCAN_BLOCK) {
        uint64_t begins = end - at >= SCAN_BLOCK && begins_ascii(at) ? block(kind, at) : 0;
        place first = at;
        if (!begins) ends[count++] = at = next_match(kind, at, end);
        for (; begins; begins &= begins - 1) ends[count++] = at = first + __builtin_ctzll(begins);
    }
    *from = at;
    return count;
}

int scan_ends(scan_kind kind, place *at, place end, place ends[SCAN_MOST]) {
    switch (kind) { /* each in a loop of its own */
    case SCAN_GPT2: return each_block_end(SCAN_GPT2, at, end, ends);
    case SCAN_LLAMA3: return each_block_end(SCAN_LLAMA3, at, end, ends);
    case SCAN_CL100K: return each_block_end(SCAN_CL100K, at, end, ends);
    case SCAN_QWEN2: return each_block_end(SCAN_QWEN2, at, end, ends);
    case SCAN_NUMBERS_2: return each_block_end(SCAN_NUMBERS_2, at, end, ends);
    case SCAN_O200K: return each_block_end(SCAN_O200K, at, end, ends);
    case SCAN_NONE:
    case SCAN_DEEPSEEK:
    case SCAN_NUMBER_TRIPLES:
    case SCAN_CJK:
    case SCAN_COUNT: break;
    }
    return each_end(kind, at, end, ends);
}

void scan_text(scan_kind kind, const char *text, size_t bytes, scan_piece *piece, void *context) {
    place at = (place)text, end = at + bytes, begin = at, ends[SCAN_MOST];
    for (int count; (count = scan_ends(kind, &at, end, ends)) > 0;)
        for (int i = 0; i < count; begin = ends[i++])
            piece(context, (const char *)begin, (size_t)(ends[i] - begin));
}
