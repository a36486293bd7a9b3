/* .tiktoken files: a line a token, its bytes in base64 and its rank, which is its id. They say
 * neither the pattern nor the special tokens: both follow from how many ranks there are. */
#include <stdlib.h>
#include <string.h>

#include "runtime/text/load.h"

enum { RESERVED = 256 }; /* of Llama 3 */

typedef struct {
    const char *text;
    uint32_t id;
} special;

static const struct {
    const char *name;
    uint32_t ranks;
    scan_kind scan;
    special specials[6];
} known[] = {
    {"r50k (GPT-2)", 50256, SCAN_GPT2, {{"<|endoftext|>", 50256}}},
    {"p50k", 50280, SCAN_GPT2, {{"<|endoftext|>", 50256}}},
    {"cl100k",
     100256,
     SCAN_CL100K,
     {{"<|endoftext|>", 100257},
      {"<|fim_prefix|>", 100258},
      {"<|fim_middle|>", 100259},
      {"<|fim_suffix|>", 100260},
      {"<|endofprompt|>", 100276}}},
    {"o200k", 199998, SCAN_O200K, {{"<|endoftext|>", 199999}, {"<|endofprompt|>", 200018}}},
    {"Llama 3", 128000, SCAN_LLAMA3, {{0}}},
    {"Qwen",
     151643,
     SCAN_QWEN2,
     {{"<|endoftext|>", 151643}, {"<|im_start|>", 151644}, {"<|im_end|>", 151645}}},
};

static int digit(char c) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const char *at = c ? strchr(digits, c) : NULL;
    return at ? (int)(at - digits) : -1;
}

size_t load_base64(const char **at, const char *end, char *to) {
    unsigned bits = 0, held = 0;
    size_t bytes = 0;
    for (; *at < end && digit(**at) >= 0; ++*at) {
        bits = bits << 6 | (unsigned)digit(**at);
        held += 6;
        if (held < 8) continue;
        held -= 8;
        if (to) to[bytes] = (char)(bits >> held);
        bytes++;
    }
    return bytes;
}

/* One line; *at is moved behind it. False: it is not a token with its rank. */
static bool read_line(const char **at, const char *end, char *to, size_t *bytes, uint32_t *rank) {
    const char *p = *at;
    *bytes = load_base64(&p, end, to);
    while (p < end && *p == '=') p++;
    if (p == *at || p == end || *p++ != ' ' || p == end || *p < '0' || *p > '9') return false;
    uint64_t value = 0;
    for (; p < end && *p >= '0' && *p <= '9' && value < TEXT_MOST_IDS; p++)
        value = value * 10 + (uint64_t)(*p - '0');
    if (p < end && *p == '\r') p++;
    if (p < end && *p++ != '\n') return false;
    *at = p;
    *rank = (uint32_t)value;
    return value < TEXT_MOST_IDS;
}

bool load_is_tiktoken(const char *text, size_t bytes) {
    uint32_t rank;
    size_t count;
    return read_line(&text, text + bytes, NULL, &count, &rank) && count > 0;
}

static void load_ranks(ml_tokenizer *t, const char *text, size_t bytes) {
    const char *at = text, *end = text + bytes;
    for (int line = 1; at < end; line++) {
        uint32_t rank;
        size_t count;
        const char *again = at;
        if (!read_line(&at, end, NULL, &count, &rank) || !count)
            ml_raise(ML_INVALID, "line %d is not a token in base64 and its rank", line);
        char *token = ml_arena_alloc(t->arena, count + 1);
        read_line(&again, end, token, &count, &rank);
        if (rank < t->vocab && t->tokens[rank].flags)
            ml_raise(ML_INVALID, "line %d has the rank %u again", line, rank);
        text_set(t, rank, (text_string){token, count}, TOKEN_VOCAB);
        if (count > t->longest) t->longest = (uint32_t)count;
    }
}

static void add_special(ml_tokenizer *t, const char *text, uint32_t id) {
    text_string copy = text_copy(t->arena, text, strlen(text));
    text_set(t, id, copy, TOKEN_ADDED | TOKEN_SPECIAL);
    *ML_PUSH(t->arena, &t->added.list) = (text_added){.text = copy, .id = id, .special = true};
}

static void add_llama3(ml_tokenizer *t) {
    static const char *const named[] = {
        "begin_of_text",   "end_of_text",   NULL, NULL,    NULL, NULL,
        "start_header_id", "end_header_id", NULL, "eot_id"};
    int reserved = 0;
    for (uint32_t i = 0; i < RESERVED; i++) {
        const char *name = i < sizeof named / sizeof *named ? named[i] : NULL;
        add_special(t,
                    name ? ml_arena_format(t->arena, "<|%s|>", name)
                         : ml_arena_format(t->arena, "<|reserved_special_token_%d|>", reserved++),
                    128000 + i);
    }
}

void load_tiktoken(ml_tokenizer *t, const char *text, size_t bytes) {
    size_t which = 0, kinds = sizeof known / sizeof *known;
    t->kind = MODEL_BPE;
    t->byte_level = t->whole = true;
    t->unknown = TEXT_NO_ID;
    load_ranks(t, text, bytes);
    text_index(t);
    uint32_t count = 0;
    for (uint32_t id = 0; id < t->vocab; id++) count += t->tokens[id].flags != 0;
    while (which < kinds && known[which].ranks != count) which++;
    if (which == kinds) {
        ml_fail(ML_INVALID,
                "its %u ranks are of no known vocabulary, so that its pattern is unknown", count);
        ml_help("known are those of r50k, p50k, cl100k, o200k, Llama 3 and Qwen; a tokenizer.json "
                "says its pattern");
        ml_raise_last();
    }
    for (int i = 0; i < 256; i++)
        t->byte_id[i] = text_find(t, &t->by_text, false, (char[]){(char)i}, 1);
    text_derive_merges(t, NULL, t->vocab, NULL); /* the least result first */
    for (int i = 0; i < 6 && known[which].specials[i].text; i++)
        add_special(t, known[which].specials[i].text, known[which].specials[i].id);
    if (known[which].ranks == 128000) add_llama3(t);
    text_index(t);
    t->by_raw = t->by_text;
    text_split *split = ML_PUSH(t->arena, &t->splits);
    *split = (text_split){.kind = SPLIT_SCAN, .scan = known[which].scan};
    load_sort_added(&t->added);
}
