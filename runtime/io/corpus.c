#include "runtime/io/corpus.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/memory.h"

struct ml_corpus {
    char *name;
    const unsigned char *data;
    int64_t tokens;
    int token_bytes;
    size_t mapped; /* bytes to unmap; 0: the memory is somebody else's */
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

static ml_status map_file(ml_corpus *corpus, int file) {
    struct stat info;
    if (fstat(file, &info) != 0)
        return ml_fail(ML_IO, "cannot read %s: %s", corpus->name, strerror(errno));
    if (!S_ISREG(info.st_mode)) return ml_fail(ML_IO, "%s is not a file", corpus->name);
    if (info.st_size == 0) return ml_fail(ML_IO, "%s is empty", corpus->name);
    if (info.st_size % corpus->token_bytes)
        return ml_fail(ML_IO, "%s has %lld bytes: a file of u16 tokens has an even number",
                       corpus->name, (long long)info.st_size);
    void *data = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, file, 0);
    if (data == MAP_FAILED)
        return ml_fail(ML_IO, "cannot map %s: %s", corpus->name, strerror(errno));
    corpus->data = data;
    corpus->mapped = (size_t)info.st_size;
    corpus->tokens = info.st_size / corpus->token_bytes;
    return ML_OK;
}

ml_status ml_corpus_open(const char *path, int token_bytes, ml_corpus **result) {
    *result = NULL;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return ml_fail(ML_IO, "cannot open %s: %s", path, strerror(errno));
    ml_status status = make(path, token_bytes, result);
    if (status == ML_OK) status = map_file(*result, file);
    close(file);
    if (status != ML_OK) {
        ml_corpus_close(*result);
        *result = NULL;
    }
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
    if (corpus->mapped) munmap((void *)(uintptr_t)corpus->data, corpus->mapped);
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

/* Token i; files of u16 tokens are little endian whatever the machine is. */
static inline int32_t token_at(const ml_corpus *corpus, int64_t i) {
    const unsigned char *at = corpus->data + i * corpus->token_bytes;
    return corpus->token_bytes == 1 ? at[0] : at[0] | at[1] << 8;
}

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
        int32_t largest = 0;
        for (int64_t i = 0; i <= length; i++) {
            int32_t token = token_at(corpus, start + i);
            if (token > largest) largest = token;
            if (i < length) inputs[row * length + i] = token;
            if (i > 0) targets[row * length + i - 1] = token;
        }
        if (!range->vocab || largest < range->vocab) continue;
        for (int64_t i = start; i <= start + length; i++) {
            if (token_at(corpus, i) < range->vocab) continue;
            ml_fail(ML_IO, "token %d at offset %lld of %s is not below vocab=%lld",
                    token_at(corpus, i), (long long)(i * corpus->token_bytes), corpus->name,
                    (long long)range->vocab);
            return ml_help("a larger vocab, or data of the tokenizer that the model is for");
        }
    }
    return ML_OK;
}
