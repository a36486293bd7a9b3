#include "runtime/text/scan.h"

#include <stdbool.h>

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
    {SCAN_CL100K, CL100K("\\p{N}{1,3}")},
    {SCAN_CL100K, "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}{1,3}|"
                  " ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+"},
    {SCAN_CL100K_TAIL, "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}++|\\p{N}{1,3}+|"
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

static inline bool is_break(unsigned char c) {
    return c == '\n' || c == '\r';
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

/* Of a run of spaces, all but the last, which belongs to what follows. */
static inline place spaces(place at, place end) {
    place to = run_in(at, end, TEXT_SPACE);
    if (to == end) return to;
    place last = back_one(to);
    return last > at ? last : to;
}

/* The same, but up to the last line break where there is one. */
static inline place lines(place at, place end, bool tail) {
    place to = run_in(at, end, TEXT_SPACE);
    if (tail && to == end) return to;
    for (place p = to; p > at; p--)
        if (is_break(p[-1])) return p;
    if (to == end) return to;
    place last = back_one(to);
    return last > at ? last : to;
}

static inline place gpt2(place at, place end) {
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
    if (class & TEXT_LETTER) return run_in(from + length, end, TEXT_LETTER);
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
    if (*at == '\'') {
        int n = contraction(at, end, true);
        if (n) return at + n;
    }
    int length, next;
    unsigned class = class_at(at, end, &length);
    if (class & TEXT_LETTER) return run_in(at + length, end, TEXT_LETTER);
    if (class & TEXT_NUMBER) return numbers(at, end, digits);
    if (!is_break(*at) && at + length < end && class_at(at + length, end, &next) & TEXT_LETTER)
        return run_in(at + length + next, end, TEXT_LETTER);
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

static inline bool is_ascii_letter(unsigned char c) {
    return (unsigned)((c | 0x20) - 'a') < 26;
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
    case SCAN_CL100K: return cl100k(at, end, 3, false);
    case SCAN_CL100K_TAIL: return cl100k(at, end, 3, true);
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

static inline void scan_each(scan_kind kind, place at, place end, scan_piece *piece,
                             void *context) {
    place gap = at; /* where what matches nothing begins */
    while (at < end) {
        place to = next_match(kind, at, end);
        if (to == at) {
            int length;
            unicode_read(at, end, &length);
            at += length;
            continue;
        }
        if (gap < at) piece(context, (const char *)gap, (size_t)(at - gap));
        piece(context, (const char *)at, (size_t)(to - at));
        gap = at = to;
    }
    if (gap < end) piece(context, (const char *)gap, (size_t)(end - gap));
}

void scan_text(scan_kind kind, const char *text, size_t bytes, scan_piece *piece, void *context) {
    place at = (place)text, end = at + bytes;
    switch (kind) { /* the common ones each in a loop of their own */
    case SCAN_GPT2: scan_each(SCAN_GPT2, at, end, piece, context); return;
    case SCAN_CL100K: scan_each(SCAN_CL100K, at, end, piece, context); return;
    case SCAN_QWEN2: scan_each(SCAN_QWEN2, at, end, piece, context); return;
    case SCAN_O200K: scan_each(SCAN_O200K, at, end, piece, context); return;
    default: scan_each(kind, at, end, piece, context); return;
    }
}
