#include "runtime/io/corpus.h"

#include <string.h>

#include "runtime/base/memory.h"
#include "runtime/io/file.h"

struct ml_corpus {
    char *name;
    ml_file file;              /* opened unless the corpus is in memory */
    const unsigned char *data; /* in memory, somebody else's; NULL: in the file */
    int64_t tokens;
    int token_bytes;
};

static ml_status make(const char *name, int token_bytes, ml_corpus **result) {
    ml_corpus *corpus = *result = ml_alloc(sizeof *corpus);
    if (corpus) corpus->name = ml_alloc(strlen(name) + 1);
    if (!corpus || !corpus->name) {
        ml_corpus_close(corpus);
        *result = NULL;
        return ml_fail(ML_NO_MEMORY, "not enough host memory to open %s", name);
    }
    strcpy(corpus->name, name);
    corpus->token_bytes = token_bytes;
    return ML_OK;
}

/* ---- What is in a file -------------------------------------------------------------------------
 */

#define FORMATS                                                                                    \
    "data files are text (a token a byte) or, called .bin, u16 tokens (little endian, no header)"

static ml_status refuse(const ml_corpus *corpus, const char *found, const char *how) {
    const char *wanted = corpus->token_bytes == 1 ? "text" : "a file of u16 tokens alone";
    ml_fail(ML_IO, "%s is not %s: it is %s", corpus->name, wanted, found);
    return how ? ml_help(FORMATS "; %s", how) : ml_help(FORMATS);
}

/* What a sample of a file has, by its bytes and by its u16 tokens. */
typedef struct {
    int64_t bytes, controls;   /* control characters that text does without */
    int64_t pairs, small, low; /* pairs of tokens, second tokens below 4, first ones below 256 */
} content;

/* White space, backspace and escape occur in text. */
static void count_content(const unsigned char *bytes, int64_t count, content *sum) {
    for (int64_t i = 0; i < count; i++) {
        bool rare = bytes[i] < 32 && !(bytes[i] >= 8 && bytes[i] <= 13) && bytes[i] != 27;
        sum->controls += rare || bytes[i] == 127;
    }
    for (int64_t i = 0; i + 3 < count; i += 4) {
        sum->low += bytes[i + 1] == 0;
        sum->small += bytes[i + 2] < 4 && bytes[i + 3] == 0;
        sum->pairs++;
    }
    sum->bytes += count;
}

/* From blocks all over the file. */
static ml_status sample_content(const ml_corpus *corpus, content *sum) {
    enum { BLOCKS = 16, BLOCK = 4096 };
    unsigned char block[BLOCK];
    int64_t bytes = corpus->file.bytes, step = bytes / BLOCKS / BLOCK * BLOCK;
    if (step < BLOCK) step = BLOCK;
    for (int64_t first = 0; first < bytes; first += step) {
        int64_t count = bytes - first < BLOCK ? bytes - first : BLOCK;
        ml_status status = ml_file_read(&corpus->file, first, block, count);
        if (status != ML_OK) return status;
        count_content(block, count, sum);
    }
    return ML_OK;
}

/* More than one control character in a hundred is no text: text has a stray one, while tokens,
 * weights and compressed data have ten or more. */
static ml_status check_text(const ml_corpus *corpus, const unsigned char *head) {
    bool little = head[0] == 0xff && head[1] == 0xfe, big = head[0] == 0xfe && head[1] == 0xff;
    if (little || big) return refuse(corpus, "UTF-16", "iconv -f UTF-16 -t UTF-8 FILE > data.txt");
    content sum = {0};
    ml_status status = sample_content(corpus, &sum);
    if (status != ML_OK || sum.controls * 100 <= sum.bytes) return status;
    ml_fail(ML_IO, "%s is not text: of %lld bytes looked at, %.0f %% are control characters",
            corpus->name, (long long)sum.bytes, 100 * (double)sum.controls / (double)sum.bytes);
    return ml_help(FORMATS "; m.corpus(file, {dtype = \"u8\"}) takes any bytes");
}

/* Every second one below 4, and others not below 256, are the halves of wider integers. */
static ml_status check_tokens(const ml_corpus *corpus) {
    enum { ENOUGH = 64 };
    content sum = {0};
    ml_status status = sample_content(corpus, &sum);
    if (status != ML_OK || sum.pairs < ENOUGH || sum.small < sum.pairs || sum.low == sum.pairs)
        return status;
    ml_fail(ML_IO, "%s is not a file of u16 tokens: every second one is below 4, as in u32 or i64",
            corpus->name);
    return ml_help("in Python, numpy.fromfile(FILE, \"uint32\").astype(\"uint16\").tofile("
                   "\"tokens.bin\"); m.corpus(file, {dtype = \"u16\"}) takes any tokens");
}

static ml_status check_content(const ml_corpus *corpus, ml_corpus_kind kind) {
    unsigned char head[ML_FILE_HEAD] = {0};
    int64_t bytes = corpus->file.bytes;
    if (bytes == 0) return ml_fail(ML_IO, "%s is empty", corpus->name);
    if (kind == ML_CORPUS_BY_NAME) {
        int64_t count = bytes < ML_FILE_HEAD ? bytes : ML_FILE_HEAD;
        ml_status status = ml_file_read(&corpus->file, 0, head, count);
        if (status != ML_OK) return status;
        const ml_file_kind *known = ml_file_kind_of(head, bytes);
        if (known) return refuse(corpus, known->what, known->help);
        status = corpus->token_bytes == 1 ? check_text(corpus, head) : check_tokens(corpus);
        if (status != ML_OK) return status;
    }
    if (bytes % corpus->token_bytes)
        return ml_fail(ML_IO, "%s has %lld bytes: a file of u16 tokens has an even number",
                       corpus->name, (long long)bytes);
    return ML_OK;
}

static bool is_binary_name(const char *path) {
    size_t length = strlen(path);
    return length >= 4 && strcmp(path + length - 4, ".bin") == 0;
}

ml_status ml_corpus_open(const char *path, ml_corpus_kind kind, ml_corpus **result) {
    bool wide = kind == ML_CORPUS_U16 || (kind == ML_CORPUS_BY_NAME && is_binary_name(path));
    ml_status status = make(path, wide ? 2 : 1, result);
    if (status != ML_OK) return status;
    ml_corpus *corpus = *result;
    status = ml_file_open(path, &corpus->file);
    if (status == ML_OK) status = check_content(corpus, kind);
    if (status == ML_OK) {
        corpus->tokens = corpus->file.bytes / corpus->token_bytes;
        return ML_OK;
    }
    ml_corpus_close(corpus);
    *result = NULL;
    return status;
}

ml_status ml_corpus_from_memory(const char *name, const void *data, size_t size,
                                ml_corpus **result) {
    ml_status status = make(name, 1, result);
    if (status != ML_OK) return status;
    (*result)->data = data;
    (*result)->tokens = (int64_t)size;
    return ML_OK;
}

void ml_corpus_close(ml_corpus *corpus) {
    if (!corpus) return;
    ml_file_close(&corpus->file);
    ml_free(corpus->name);
    ml_free(corpus);
}

int64_t ml_corpus_tokens(const ml_corpus *corpus) {
    return corpus->tokens;
}

const char *ml_corpus_name(const ml_corpus *corpus) {
    return corpus->name;
}

int ml_corpus_token_bytes(const ml_corpus *corpus) {
    return corpus->token_bytes;
}

/* ---- Drawing -----------------------------------------------------------------------------------
 */

/* SplitMix64's finalizer. */
static uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* A number below n (up to a bias of n / 2^64), the same for the same (seed, sample). */
static int64_t draw(int64_t seed, int64_t sample, int64_t n) {
    const uint64_t golden = 0x9e3779b97f4a7c15u;
    uint64_t bits = mix(mix((uint64_t)seed + golden) + ((uint64_t)sample + 1) * golden);
    return (int64_t)(((unsigned __int128)bits * (uint64_t)n) >> 64);
}

static ml_status beyond_vocab(const ml_corpus *corpus, int32_t token, int64_t at, int64_t vocab) {
    ml_fail(ML_IO, "token %d at offset %lld of %s is not below vocab=%lld", token,
            (long long)(at * corpus->token_bytes), corpus->name, (long long)vocab);
    return ml_help("a larger vocab, or data of the tokenizer that the model is for");
}

/* The window of length + 1 tokens from `start`: all but the last, and all but the first. */
static ml_status read_window(const ml_corpus *corpus, int64_t start, int64_t length, int64_t vocab,
                             int32_t *inputs, int32_t *targets) {
    enum { BLOCK = 8192 }; /* tokens */
    unsigned char block[2 * BLOCK];
    int width = corpus->token_bytes;
    for (int64_t i = 0; i <= length; i += BLOCK) {
        int64_t count = length + 1 - i < BLOCK ? length + 1 - i : BLOCK;
        const unsigned char *bytes = block;
        if (corpus->data) {
            bytes = corpus->data + (start + i) * width;
        } else {
            ml_status status =
                ml_file_read(&corpus->file, (start + i) * width, block, count * width);
            if (status != ML_OK) return status;
        }
        for (int64_t k = 0; k < count; k++) {
            int32_t token = width == 1 ? bytes[k] : bytes[2 * k] | bytes[2 * k + 1] << 8;
            if (vocab && token >= vocab) return beyond_vocab(corpus, token, start + i + k, vocab);
            if (i + k < length) inputs[i + k] = token;
            if (i + k > 0) targets[i + k - 1] = token;
        }
    }
    return ML_OK;
}

ml_status ml_corpus_fill(const ml_corpus *corpus, const ml_corpus_range *range, int64_t sample,
                         int64_t rows, int64_t length, int32_t *inputs, int32_t *targets) {
    int64_t starts = range->last - range->first - length;
    if (starts < 1) {
        ml_fail(ML_IO, "%s has %lld tokens to draw from: a window of seq=%lld needs %lld",
                corpus->name, (long long)(range->last - range->first), (long long)length,
                (long long)length + 1);
        return ml_help("take a smaller seq, or more data");
    }
    for (int64_t row = 0; row < rows; row++) {
        int64_t start = range->first + draw(range->seed, sample + row, starts);
        ml_status status = read_window(corpus, start, length, range->vocab, inputs + row * length,
                                       targets + row * length);
        if (status != ML_OK) return status;
    }
    return ML_OK;
}
