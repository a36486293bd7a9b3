/* tokenizer.json: what happens before and after the model. Each part is known by its type, and one
 * that is not is refused by it. */
#define _GNU_SOURCE /* memmem */
#include <string.h>

#include "runtime/text/load.h"
#include "runtime/text/regex.h"

static bool is(const char *a, const char *b) {
    return strcmp(a, b) == 0;
}

static _Noreturn void refuse(const char *what, const char *type) {
    ml_raise(ML_INVALID, "its %s %s is not supported", what, type);
}

static text_string string_of(ml_tokenizer *t, const char *text) {
    return text_copy(t->arena, text, strlen(text));
}

static void *compile(ml_tokenizer *t, const char *pattern) {
    void **code = ML_PUSH(t->arena, &t->codes);
    ML_CHECK(regex_compile(pattern, strlen(pattern), code));
    return *code;
}

/* {"String": text} or {"Regex": text}. */
static text_pattern pattern_of(ml_tokenizer *t, const json_t *object) {
    const json_t *pattern = json_object_get(object, "pattern");
    const char *regex = load_text(pattern, "Regex", NULL);
    if (regex) return (text_pattern){.code = compile(t, regex)};
    const char *text =
        json_is_string(pattern) ? json_string_value(pattern) : load_text(pattern, "String", NULL);
    if (!text || !*text) ml_raise(ML_INVALID, "a pattern must be a String or a Regex");
    return (text_pattern){.text = string_of(t, text)};
}

static text_split *add_split(ml_tokenizer *t, text_split_kind kind, text_behavior behavior) {
    if (t->splits.count == TEXT_MOST_STEPS)
        ml_raise(ML_INVALID, "it has more than %d pre-tokenizers", TEXT_MOST_STEPS);
    text_split *split = ML_PUSH(t->arena, &t->splits);
    split->kind = kind;
    split->behavior = behavior;
    if (t->byte_level) t->mapped = true; /* a step after ByteLevel */
    return split;
}

static text_normal *add_normal(ml_tokenizer *t, text_normal_kind kind) {
    if (t->normals.count == TEXT_MOST_STEPS)
        ml_raise(ML_INVALID, "it has more than %d normalizers", TEXT_MOST_STEPS);
    text_normal *step = ML_PUSH(t->arena, &t->normals);
    step->kind = kind;
    return step;
}

static void load_precompiled(ml_tokenizer *t, const json_t *step) {
    const char *text = load_text(step, "precompiled_charsmap", ""), *end = text + strlen(text);
    if (t->charsmap_trie) refuse("normalizer", "a second Precompiled");
    char *map = ml_arena_alloc(t->arena, strlen(text) + 1);
    size_t bytes = load_base64(&text, end, map);
    if (text[strspn(text, "=")]) ml_raise(ML_INVALID, "its precompiled_charsmap is no base64");
    load_charsmap(t, map, bytes);
    add_normal(t, NORMAL_PRECOMPILED);
}

static void load_normal(ml_tokenizer *t, const json_t *step, int depth) {
    static const struct {
        const char *type;
        text_normal_kind kind;
    } plain[] = {{"NFC", NORMAL_NFC},
                 {"NFD", NORMAL_NFD},
                 {"NFKC", NORMAL_NFKC},
                 {"NFKD", NORMAL_NFKD},
                 {"Lowercase", NORMAL_LOWERCASE},
                 {"StripAccents", NORMAL_ACCENTS}};
    if (!step || json_is_null(step)) return;
    const char *type = load_text(step, "type", "without a type");
    size_t i;
    json_t *part;
    for (i = 0; i < sizeof plain / sizeof *plain; i++)
        if (is(type, plain[i].type)) {
            add_normal(t, plain[i].kind);
            return;
        }
    if (is(type, "Sequence") && depth < TEXT_MOST_STEPS) {
        json_array_foreach(json_object_get(step, "normalizers"), i, part)
            load_normal(t, part, depth + 1);
    } else if (is(type, "Strip")) {
        text_normal *normal = add_normal(t, NORMAL_STRIP);
        normal->left = load_flag(step, "strip_left", true);
        normal->right = load_flag(step, "strip_right", true);
    } else if (is(type, "Replace")) {
        text_normal *normal = add_normal(t, NORMAL_REPLACE);
        normal->from = pattern_of(t, step);
        normal->to = string_of(t, load_text(step, "content", ""));
    } else if (is(type, "Prepend")) {
        add_normal(t, NORMAL_PREPEND)->to = string_of(t, load_text(step, "prepend", ""));
    } else if (is(type, "Precompiled")) {
        load_precompiled(t, step);
    } else if (is(type, "ByteLevel")) {
        add_split(t, SPLIT_BYTES, PIECE_ISOLATED); /* the last normalizer in the files known */
        t->byte_level = true;
    } else {
        refuse("normalizer", type);
    }
}

static text_behavior behavior_of(const json_t *step, const char *fallback) {
    static const char *const names[] = {"Isolated", "Removed", "Contiguous", "MergedWithPrevious",
                                        "MergedWithNext"};
    const char *name = load_text(step, "behavior", fallback);
    for (int i = 0; i < 5; i++)
        if (is(name, names[i])) return (text_behavior)i;
    refuse("pre-tokenizer's behavior", name);
}

static text_prefix prefix_of(const json_t *step) {
    const char *scheme = load_text(step, "prepend_scheme",
                                   load_flag(step, "add_prefix_space", true) ? "always" : "never");
    if (is(scheme, "always")) return PREFIX_ALWAYS;
    if (is(scheme, "first")) return PREFIX_FIRST;
    if (is(scheme, "never")) return PREFIX_NEVER;
    refuse("prepend_scheme", scheme);
}

static void load_split_pattern(ml_tokenizer *t, const json_t *step) {
    const char *regex = load_text(json_object_get(step, "pattern"), "Regex", NULL);
    scan_kind scan = regex ? scan_of_pattern(regex) : SCAN_NONE;
    text_behavior behavior = behavior_of(step, "Removed");
    bool invert = load_flag(step, "invert", false);
    if (scan != SCAN_NONE && behavior == PIECE_ISOLATED && !t->byte_level) {
        add_split(t, SPLIT_SCAN, behavior)->scan = scan;
        return;
    }
    text_split *split = add_split(t, SPLIT_PATTERN, behavior);
    split->pattern = pattern_of(t, step);
    split->invert = invert;
}

static void load_byte_level(ml_tokenizer *t, const json_t *step) {
    if (t->byte_level) ml_raise(ML_INVALID, "a second ByteLevel is not supported");
    text_split *split = add_split(t, SPLIT_BYTES, PIECE_ISOLATED);
    split->scan = load_flag(step, "use_regex", true) ? SCAN_GPT2 : SCAN_NONE;
    split->prefix = load_flag(step, "add_prefix_space", true) ? PREFIX_ALWAYS : PREFIX_NEVER;
    t->byte_level = true;
}

static void load_split(ml_tokenizer *t, const json_t *step, int depth) {
    if (!step || json_is_null(step)) return;
    const char *type = load_text(step, "type", "without a type");
    size_t i;
    json_t *part;
    if (is(type, "Sequence") && depth < TEXT_MOST_STEPS) {
        json_array_foreach(json_object_get(step, "pretokenizers"), i, part)
            load_split(t, part, depth + 1);
    } else if (is(type, "Split")) {
        load_split_pattern(t, step);
    } else if (is(type, "ByteLevel")) {
        load_byte_level(t, step);
    } else if (is(type, "Digits")) {
        add_split(t, SPLIT_NUMBERS,
                  load_flag(step, "individual_digits", false) ? PIECE_ISOLATED : PIECE_CONTIGUOUS);
    } else if (is(type, "Punctuation")) {
        add_split(t, SPLIT_PUNCTUATION, behavior_of(step, "Isolated"));
    } else if (is(type, "WhitespaceSplit")) {
        add_split(t, SPLIT_SPACES, PIECE_REMOVED);
    } else if (is(type, "Whitespace")) {
        text_split *split = add_split(t, SPLIT_PATTERN, PIECE_REMOVED);
        split->pattern.code = compile(t, "\\w+|[^\\w\\s]+");
        split->invert = true;
    } else if (is(type, "CharDelimiterSplit")) {
        add_split(t, SPLIT_PATTERN, PIECE_REMOVED)->pattern.text =
            string_of(t, load_text(step, "delimiter", " "));
    } else if (is(type, "Metaspace")) {
        text_split *split = add_split(t, SPLIT_METASPACE, PIECE_WITH_NEXT);
        split->to = string_of(t, load_text(step, "replacement", METASPACE));
        split->pattern.text = split->to;
        split->prefix = prefix_of(step);
        split->pieces = load_flag(step, "split", true);
    } else {
        refuse("pre-tokenizer", type);
    }
}

static void add_frame(ml_tokenizer *t, bool after, int64_t id) {
    if (id < 0 || id >= t->vocab || !t->tokens[id].flags)
        ml_raise(ML_INVALID, "its post-processor adds the id %lld, which is not a token",
                 (long long)id);
    *(after ? ML_PUSH(t->arena, &t->after) : ML_PUSH(t->arena, &t->before)) = (uint32_t)id;
}

static void load_template(ml_tokenizer *t, const json_t *step) {
    bool after = false;
    size_t i, k;
    json_t *part, *id;
    json_array_foreach(json_object_get(step, "single"), i, part) {
        const char *name = load_text(json_object_get(part, "SpecialToken"), "id", NULL);
        if (!name) {
            if (after) ml_raise(ML_INVALID, "its template repeats the text");
            after = true;
            continue;
        }
        const json_t *known = json_object_get(json_object_get(step, "special_tokens"), name);
        json_array_foreach(json_object_get(known, "ids"), k, id)
            add_frame(t, after, json_is_integer(id) ? json_integer_value(id) : -1);
    }
}

static void load_frame(ml_tokenizer *t, const json_t *step, int depth) {
    if (!step || json_is_null(step)) return;
    const char *type = load_text(step, "type", "without a type");
    size_t i;
    json_t *part;
    if (is(type, "Sequence") && depth < TEXT_MOST_STEPS) {
        json_array_foreach(json_object_get(step, "processors"), i, part)
            load_frame(t, part, depth + 1);
    } else if (is(type, "TemplateProcessing")) {
        load_template(t, step);
    } else if (is(type, "RobertaProcessing") || is(type, "BertProcessing")) {
        add_frame(t, false, json_integer_value(json_array_get(json_object_get(step, "cls"), 1)));
        add_frame(t, true, json_integer_value(json_array_get(json_object_get(step, "sep"), 1)));
    } else if (!is(type, "ByteLevel")) {
        refuse("post-processor", type);
    }
}

/* Replaces in the raw text of every token. */
static void replace_raw(ml_tokenizer *t, text_string from, text_string to) {
    for (uint32_t id = 0; id < t->vocab; id++) {
        text_token *token = &t->tokens[id];
        if (!token->flags || !memmem(token->raw.at, token->raw.bytes, from.at, from.bytes))
            continue;
        const char *at = token->raw.at, *end = at + token->raw.bytes, *found;
        char *text = ml_arena_alloc(t->arena, token->raw.bytes * (to.bytes + 1) + 1);
        size_t bytes = 0;
        while ((found = memmem(at, (size_t)(end - at), from.at, from.bytes))) {
            memcpy(text + bytes, at, (size_t)(found - at));
            memcpy(text + bytes + (found - at), to.at, to.bytes);
            bytes += (size_t)(found - at) + to.bytes;
            at = found + from.bytes;
        }
        memcpy(text + bytes, at, (size_t)(end - at));
        token->raw = (text_string){text, bytes + (size_t)(end - at)};
    }
}

static void mark_byte_tokens(ml_tokenizer *t) {
    for (uint32_t id = 0; id < t->vocab; id++) {
        text_token *token = &t->tokens[id];
        unsigned byte;
        int read = 0;
        if (token->flags && token->raw.bytes == 6 &&
            sscanf(token->raw.at, "<0x%2x>%n", &byte, &read) == 1 && read == 6) {
            char value = (char)byte;
            token->raw = text_copy(t->arena, &value, 1);
            token->flags |= TOKEN_BYTE;
        }
    }
}

static void load_decoder(ml_tokenizer *t, const json_t *step, int depth, bool *fused) {
    const char *type = load_text(step, "type", "without a type");
    size_t i;
    json_t *part;
    if (is(type, "Sequence") && depth < TEXT_MOST_STEPS) {
        json_array_foreach(json_object_get(step, "decoders"), i, part)
            load_decoder(t, part, depth + 1, fused);
    } else if (is(type, "Replace")) {
        text_pattern from = pattern_of(t, step);
        if (from.code) refuse("decoder", "Replace by a Regex");
        replace_raw(t, from.text, string_of(t, load_text(step, "content", "")));
    } else if (is(type, "ByteFallback")) {
        t->decoding.fallback = true;
        mark_byte_tokens(t);
    } else if (is(type, "Fuse")) {
        *fused = true;
    } else if (is(type, "Strip")) {
        if (!*fused || json_integer_value(json_object_get(step, "stop")) != 0)
            refuse("decoder", "Strip before Fuse, or of the end,");
        t->decoding.strip = string_of(t, load_text(step, "content", " "));
        t->decoding.strip_count = json_integer_value(json_object_get(step, "start"));
    } else if (is(type, "Metaspace")) {
        t->decoding.space = string_of(t, load_text(step, "replacement", METASPACE));
        t->decoding.no_leading = prefix_of(step) != PREFIX_NEVER;
        replace_raw(t, t->decoding.space, string_of(t, " "));
    } else if (!is(type, "ByteLevel")) {
        refuse("decoder", type);
    }
}

void load_steps(ml_tokenizer *t, const json_t *root) {
    const json_t *decoder = json_object_get(root, "decoder");
    bool fused = false;
    load_normal(t, json_object_get(root, "normalizer"), 0);
    load_split(t, json_object_get(root, "pre_tokenizer"), 0);
    if (t->splits.count && !t->mapped) { /* a ByteLevel that changes nothing */
        const text_split *last = &t->splits.at[t->splits.count - 1];
        if (last->kind == SPLIT_BYTES && last->scan == SCAN_NONE && last->prefix == PREFIX_NEVER)
            t->splits.count--;
    }
    load_frame(t, json_object_get(root, "post_processor"), 0);
    if (decoder && !json_is_null(decoder))
        load_decoder(t, decoder, 0, &fused);
    else
        t->decoding.spaced = true;
}
