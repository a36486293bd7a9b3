#define _GNU_SOURCE /* memmem */
#include "runtime/text/normalize.h"

#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "runtime/text/unicode.h"

typedef const unsigned char *place;

/* Hugging Face's library normalizes by Unicode 9: what came later with a class of combination or a
 * decomposition is an ordinary character to it. */
static const uint32_t later[][2] = {
    {0x7FD, 0x7FD},     {0x897, 0x89F},     {0x8CA, 0x8D3},     {0x9FE, 0x9FE},
    {0xC3C, 0xC3C},     {0xD3B, 0xD3C},     {0xEBA, 0xEBA},     {0x1715, 0x1715},
    {0x1ABF, 0x1ADD},   {0x1AE0, 0x1AEB},   {0x1DF6, 0x1DFA},   {0x32FF, 0x32FF},
    {0xA7F1, 0xA7F4},   {0xA82C, 0xA82C},   {0xAB69, 0xAB69},   {0x105C9, 0x105C9},
    {0x105E4, 0x105E4}, {0x10781, 0x10785}, {0x10787, 0x107B0}, {0x107B2, 0x107BA},
    {0x10D24, 0x10D27}, {0x10D69, 0x10D6D}, {0x10EAB, 0x10EAC}, {0x10EFA, 0x10EFB},
    {0x10EFD, 0x10EFF}, {0x10F46, 0x10F50}, {0x10F82, 0x10F85}, {0x11070, 0x11070},
    {0x1133B, 0x1133B}, {0x11383, 0x11383}, {0x11385, 0x11385}, {0x1138E, 0x1138E},
    {0x11391, 0x11391}, {0x113C5, 0x113C5}, {0x113C7, 0x113C8}, {0x113CE, 0x113D0},
    {0x1145E, 0x1145E}, {0x11839, 0x1183A}, {0x11930, 0x11930}, {0x11938, 0x11938},
    {0x1193D, 0x1193E}, {0x11943, 0x11943}, {0x119E0, 0x119E0}, {0x11A34, 0x11A34},
    {0x11A47, 0x11A47}, {0x11A99, 0x11A99}, {0x11D42, 0x11D42}, {0x11D44, 0x11D45},
    {0x11D97, 0x11D97}, {0x11F41, 0x11F42}, {0x16121, 0x16128}, {0x1612F, 0x1612F},
    {0x16D68, 0x16D6A}, {0x16FF0, 0x16FF1}, {0x1CCD6, 0x1CCF9}, {0x1E030, 0x1E06D},
    {0x1E08F, 0x1E08F}, {0x1E130, 0x1E136}, {0x1E2AE, 0x1E2AE}, {0x1E2EC, 0x1E2EF},
    {0x1E4EC, 0x1E4EF}, {0x1E5EE, 0x1E5EF}, {0x1E6E3, 0x1E6E3}, {0x1E6E6, 0x1E6E6},
    {0x1E6EE, 0x1E6EF}, {0x1E6F5, 0x1E6F5}, {0x1F16C, 0x1F16C}, {0x1FBF0, 0x1FBF9}};

/* Bit f: a character that normal form f leaves as it is whatever stands beside it, and before which
 * a part that is normalized alone may end. */
static unsigned char stable[TEXT_CLASSES];
enum { LATER = 1 << 7 };
static const utf8proc_option_t form_options[] = {
    [NORMAL_NFC] = UTF8PROC_STABLE | UTF8PROC_COMPOSE,
    [NORMAL_NFD] = UTF8PROC_STABLE | UTF8PROC_DECOMPOSE,
    [NORMAL_NFKC] = UTF8PROC_STABLE | UTF8PROC_COMPOSE | UTF8PROC_COMPAT,
    [NORMAL_NFKD] = UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT};

static bool composes_to_itself(uint32_t c, int form) {
    char text[4];
    utf8proc_uint8_t *to = NULL;
    int bytes = unicode_write(c, text);
    utf8proc_ssize_t made = utf8proc_map((place)text, bytes, &to, form_options[form]);
    bool same = made == bytes && memcmp(to, text, (size_t)bytes) == 0;
    free(to);
    return same;
}

static bool is_stable(uint32_t c, int form) {
    const utf8proc_property_t *p = utf8proc_get_property((utf8proc_int32_t)c);
    bool hangul = c >= 0xAC00 && c < 0xD7A4, composed = form == NORMAL_NFC || form == NORMAL_NFKC;
    if (p->combining_class || (composed && c >= 0x1160 && c < 0x1200)) return false;
    if (composed && p->comb_index != UINT16_MAX && p->comb_index >= 0x8000) return false;
    if (hangul) return composed;
    if (p->decomp_seqindex == UINT16_MAX) return true;
    return composed && composes_to_itself(c, form);
}

static void fill_stable(void) {
    for (uint32_t c = 0; c < TEXT_CLASSES; c++)
        for (int form = NORMAL_NFC; form <= NORMAL_NFKD; form++)
            if (is_stable(c, form)) stable[c] |= (unsigned char)(1 << form);
    for (size_t i = 0; i < sizeof later / sizeof *later; i++)
        for (uint32_t c = later[i][0]; c <= later[i][1]; c++) stable[c] = UCHAR_MAX;
}

void normalize_prepare(const ml_tokenizer *t) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    for (uint32_t i = 0; i < t->normals.count; i++)
        if (t->normals.at[i].kind <= NORMAL_NFKD) pthread_once(&once, fill_stable);
}

static bool is_stable_at(place at, place end, int form, int *length) {
    uint32_t c = unicode_read(at, end, length);
    return c >= TEXT_CLASSES || stable[c] >> form & 1;
}

/* A normal form: only what is not stable is handed to utf8proc, with the character before. */
static ml_status normal_form(int form, place at, place end, ml_bytes *to) {
    place copied = at, before = at;
    for (int length; at < end; before = at, at += length) {
        if (*at < 0x80) {
            length = 1;
            continue;
        }
        if (is_stable_at(at, end, form, &length)) continue;
        int first;
        uint32_t c = unicode_read(before, end, &first);
        bool alone = c >= TEXT_NO_CHARACTER || (c < TEXT_CLASSES && stable[c] & LATER);
        place from = alone ? at : before;
        place next = at;
        while (next < end && !is_stable_at(next, end, form, &length)) next += length;
        ML_TRY(ml_bytes_add(to, copied, (size_t)(from - copied)));
        utf8proc_uint8_t *made = NULL;
        utf8proc_ssize_t bytes = utf8proc_map(from, next - from, &made, form_options[form]);
        ml_status status = bytes < 0 ? ml_fail(ML_NO_MEMORY, "cannot normalize %zd bytes: %s",
                                               next - from, utf8proc_errmsg(bytes))
                                     : ml_bytes_add(to, made, (size_t)bytes);
        free(made);
        if (status != ML_OK) return status;
        copied = at = next;
        length = 0;
    }
    return ml_bytes_add(to, copied, (size_t)(end - copied));
}

static ml_status add_character(ml_bytes *to, uint32_t c) {
    char text[4];
    return ml_bytes_add(to, text, (size_t)unicode_write(c, text));
}

/* Lower case, or without marks. */
static ml_status by_character(text_normal_kind kind, place at, place end, ml_bytes *to) {
    for (int length; at < end; at += length) {
        uint32_t c = unicode_read(at, end, &length);
        if (c >= TEXT_NO_CHARACTER || (kind == NORMAL_ACCENTS && !(unicode_class(c) & TEXT_MARK))) {
            ML_TRY(ml_bytes_add(to, at, (size_t)length));
        } else if (kind == NORMAL_LOWERCASE) {
            ML_TRY(add_character(to, c == 0x130 ? 'i' : (uint32_t)utf8proc_tolower((int32_t)c)));
            if (c == 0x130) ML_TRY(add_character(to, 0x307));
        }
    }
    return ML_OK;
}

static ml_status strip(const text_normal *step, place at, place end, ml_bytes *to) {
    place first = NULL, last = at; /* of what is no space: its beginning and its end */
    int length;
    for (place p = at; p < end; p += length)
        if (!(unicode_class(unicode_read(p, end, &length)) & TEXT_SPACE)) {
            if (!first) first = p;
            last = p + length;
        }
    if (!first) return ML_OK;
    if (!step->left) first = at;
    return ml_bytes_add(to, first, (size_t)((step->right ? last : end) - first));
}

static ml_status replace(const text_normal *step, regex_matcher *matcher, const char *text,
                         size_t bytes, ml_bytes *to) {
    size_t at = 0;
    while (at <= bytes) {
        size_t begin = bytes, end = bytes;
        int found = 0;
        if (step->from.code) {
            found = regex_find(matcher, step->from.code, text, bytes, at, &begin, &end);
            if (found < 0) return ml_error_last()->status;
        } else {
            const char *where =
                memmem(text + at, bytes - at, step->from.text.at, step->from.text.bytes);
            if (where) found = 1, begin = (size_t)(where - text);
            end = begin + (where ? step->from.text.bytes : 0);
        }
        ML_TRY(ml_bytes_add(to, text + at, begin - at));
        if (!found) break;
        ML_TRY(ml_bytes_add(to, step->to.at, step->to.bytes));
        if (end == begin) { /* an empty match: go on behind the next character */
            int length = 0;
            if (end < bytes) unicode_read((place)text + end, (place)text + bytes, &length);
            ML_TRY(ml_bytes_add(to, text + end, (size_t)length));
            end += length ? (size_t)length : 1;
        }
        at = end;
    }
    return ML_OK;
}

/* The longest text of SentencePiece's map that `at` begins with (a Darts double array), or the
 * shortest: its bytes, and its replacement; 0: none. */
static size_t find_mapped(const ml_tokenizer *t, place at, place end, bool shortest,
                          const char **to) {
    size_t node = 0, found = 0;
    const uint32_t *unit = t->charsmap_trie;
    if (!unit) return 0;
#define OFFSET(u) ((size_t)((u) >> 10) << (((u)&512) >> 6))
    node ^= OFFSET(unit[0]);
    for (place p = at; p < end; p++) {
        node ^= *p;
        if (node >= t->charsmap_units || (unit[node] & (1u << 31 | 0xFF)) != *p) break;
        uint32_t here = unit[node];
        node ^= OFFSET(here);
        if (node >= t->charsmap_units) break;
        if (here >> 8 & 1 && (unit[node] & 0x7FFFFFFF) < t->charsmap_texts.bytes) {
            found = (size_t)(p + 1 - at);
            *to = t->charsmap_texts.at + (unit[node] & 0x7FFFFFFF);
            if (shortest) break;
        }
    }
#undef OFFSET
    return found;
}

static ml_status add_spaced(ml_bytes *to, const char *text, size_t bytes, text_string space) {
    for (const char *end = text + bytes, *next; text < end; text = next + 1) {
        if (!(next = memchr(text, ' ', (size_t)(end - text))))
            return ml_bytes_add(to, text, (size_t)(end - text));
        ML_TRY(ml_bytes_add(to, text, (size_t)(next - text)));
        ML_TRY(ml_bytes_add(to, space.at, space.bytes));
    }
    return ML_OK;
}

/* As SentencePiece: symbols of the user stay as they are, the map applies to the rest; `to` of
 * the step stands for a space. */
static ml_status sentencepiece(const ml_tokenizer *t, const text_normal *step, place at, place end,
                               ml_bytes *to) {
    const text_added_set *symbols = &t->added_normalized;
    text_string space = step->to;
    bool spaced = step->right; /* what came before ends with a space */
    if (at < end && step->left) ML_TRY(ml_bytes_add(to, space.at, space.bytes));
    for (size_t found, bytes; at < end; at += found) {
        const char *made = (const char *)at;
        const text_added *symbol =
            symbols->first[*at] ? text_find_added(symbols, made, (size_t)(end - at)) : NULL;
        if (symbol) {
            found = bytes = symbol->text.bytes;
        } else if ((found = find_mapped(t, at, end, false, &made))) {
            bytes = strlen(made);
        } else {
            int length;
            unicode_read(at, end, &length);
            found = bytes = (size_t)length;
        }
        for (; spaced && bytes && *made == ' '; bytes--) made++;
        if (bytes) spaced = step->right && made[bytes - 1] == ' ';
        ML_TRY(add_spaced(to, made, bytes, space));
    }
    while (step->right && to->count >= space.bytes &&
           memcmp(to->at + to->count - space.bytes, space.at, space.bytes) == 0)
        to->count -= space.bytes;
    return ML_OK;
}

/* The same map as Hugging Face's library applies it: the shortest text that a grapheme of at most 5
 * bytes begins with replaces the whole grapheme, or one that a character begins with it. */
static ml_status precompiled(const ml_tokenizer *t, place at, place end, ml_bytes *to) {
    const char *made;
    for (place next; at < end;) {
        int length;
        utf8proc_int32_t state = 0, last = (utf8proc_int32_t)unicode_read(at, end, &length), c;
        for (next = at + length; next < end; next += length, last = c) {
            c = (utf8proc_int32_t)unicode_read(next, end, &length);
            if (utf8proc_grapheme_break_stateful(last, c, &state)) break;
        }
        if (next - at <= 5 && find_mapped(t, at, next, true, &made)) {
            ML_TRY(ml_bytes_add(to, made, strlen(made)));
            at = next;
        }
        for (; at < next; at += length) {
            unicode_read(at, end, &length);
            bool found = find_mapped(t, at, at + length, true, &made);
            ML_TRY(found ? ml_bytes_add(to, made, strlen(made))
                         : ml_bytes_add(to, at, (size_t)length));
        }
    }
    return ML_OK;
}

static ml_status apply(const ml_tokenizer *t, const text_normal *step, regex_matcher *matcher,
                       const ml_bytes *from, ml_bytes *to) {
    place at = (place)(from->at ? from->at : ""), end = at + from->count;
    switch (step->kind) {
    case NORMAL_NFC:
    case NORMAL_NFD:
    case NORMAL_NFKC:
    case NORMAL_NFKD: return normal_form(step->kind, at, end, to);
    case NORMAL_LOWERCASE:
    case NORMAL_ACCENTS: return by_character(step->kind, at, end, to);
    case NORMAL_STRIP: return strip(step, at, end, to);
    case NORMAL_REPLACE: return replace(step, matcher, (const char *)at, from->count, to);
    case NORMAL_PREPEND:
        if (from->count) ML_TRY(ml_bytes_add(to, step->to.at, step->to.bytes));
        return ml_bytes_add(to, at, from->count);
    case NORMAL_SENTENCEPIECE: return sentencepiece(t, step, at, end, to);
    case NORMAL_PRECOMPILED: return precompiled(t, at, end, to);
    }
    return ml_bytes_add(to, at, from->count);
}

ml_status normalize_text(const ml_tokenizer *t, regex_matcher *matcher, const char *from,
                         size_t bytes, ml_bytes text[2], int *at) {
    *at = 0;
    text[0].count = 0;
    ML_TRY(ml_bytes_add(&text[0], from, bytes));
    for (uint32_t i = 0; i < t->normals.count; i++) {
        text[!*at].count = 0;
        ML_TRY(apply(t, &t->normals.at[i], matcher, &text[*at], &text[!*at]));
        *at = !*at;
    }
    return ML_OK;
}
