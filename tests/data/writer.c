/* Files of tokens, to the bit, and read again. */
#include "runtime/data/writer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "runtime/data/corpus.h"
#include "tests/data/support.h"
#include "tests/test.h"

static void write_tokens(const char *path, ml_write_format format, int width) {
    static const uint32_t ids[] = {9, 60000, 2, 50256, 7};
    ml_writer *writer;
    CHECK_STATUS(ml_writer_open(path, format, width, &writer), ML_OK);
    CHECK_STATUS(ml_writer_add(writer, ids, 2), ML_OK);
    CHECK_STATUS(ml_writer_add(writer, ids + 2, 1), ML_OK);
    CHECK_STATUS(ml_writer_end_document(writer), ML_OK);
    CHECK_STATUS(ml_writer_add(writer, ids + 3, 2), ML_OK);
    CHECK_STATUS(ml_writer_close(writer, true), ML_OK);
}

static void check_same(data_room *r, const char *name, const char *other) {
    char command[256];
    snprintf(command, sizeof command, "cmp %s/%s %s/%s", r->folder, name, r->folder, other);
    EXPECT(system(command) == 0, "%s is not %s", name, other);
}

TEST(data, writers_write_to_the_bit) {
    static const uint16_t narrow[] = {9, 60000, 2, 50256, 7};
    static const uint32_t wide[] = {9, 60000, 2, 50256, 7};
    static const int32_t lengths[] = {3, 2};
    int32_t header[256] = {20240520, 1, 5};
    data_room r;
    room_enter(&r);
    room_put(&r, "narrow", "wb", narrow, sizeof narrow);
    room_put(&r, "wide", "wb", wide, sizeof wide);
    write_tokens(room_path(&r, "n2.bin"), ML_WRITE_PLAIN, 2);
    check_same(&r, "n2.bin", "narrow");
    write_tokens(room_path(&r, "n4.bin"), ML_WRITE_PLAIN, 4);
    check_same(&r, "n4.bin", "wide");
    room_put(&r, "llmc", "wb", header, sizeof header);
    room_put(&r, "llmc", "ab", narrow, sizeof narrow);
    write_tokens(room_path(&r, "l2.bin"), ML_WRITE_LLMC, 2);
    check_same(&r, "l2.bin", "llmc");
    header[0] = 20240801, header[1] = 7;
    room_put(&r, "llama", "wb", header, sizeof header);
    room_put(&r, "llama", "ab", wide, sizeof wide);
    write_tokens(room_path(&r, "l4.bin"), ML_WRITE_LLMC, 4);
    check_same(&r, "l4.bin", "llama");
    room_put_index(&r, "index2", 8, lengths, 2, 2);
    write_tokens(room_path(&r, "m2.bin"), ML_WRITE_MEGATRON, 2);
    check_same(&r, "m2.bin", "narrow");
    check_same(&r, "m2.idx", "index2");
    room_put_index(&r, "index4", 4, lengths, 2, 4);
    write_tokens(room_path(&r, "m4.bin"), ML_WRITE_MEGATRON, 4);
    check_same(&r, "m4.bin", "wide");
    check_same(&r, "m4.idx", "index4");
    ml_writer *writer;
    CHECK_STATUS(ml_writer_open(room_path(&r, "m4.bin"), ML_WRITE_PLAIN, 4, &writer), ML_IO);
    room_check_error(&r, "cannot write DIR/m4.bin: DIR/m4.idx would be taken for its index");
    room_leave(&r);
}

/* All that one writes and the other reads. */
TEST(data, what_is_written_is_read) {
    static const int32_t expected[] = {9, 60000, 2, 50256, 7};
    static const struct {
        const char *name;
        ml_write_format format;
        int width, documents;
    } files[] = {{"a.bin", ML_WRITE_PLAIN, 2, 1},
                 {"b.bin", ML_WRITE_LLMC, 2, 1},
                 {"c.bin", ML_WRITE_LLMC, 4, 1},
                 {"d.bin", ML_WRITE_MEGATRON, 2, 2},
                 {"e.bin", ML_WRITE_MEGATRON, 4, 2}};
    data_room r;
    room_enter(&r);
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        int32_t tokens[5] = {0};
        ml_corpus *corpus = NULL;
        write_tokens(room_path(&r, files[i].name), files[i].format, files[i].width);
        CHECK_STATUS(ml_corpus_open(r.path, ML_CORPUS_BY_NAME, NULL, &corpus), ML_OK);
        REQUIRE(corpus != NULL);
        CHECK_EQ_INT(ml_corpus_documents(corpus), files[i].documents);
        ml_corpus_range range = {.to = 1};
        CHECK_STATUS(ml_corpus_sample(corpus, &range, 0, 4, tokens, NULL), ML_OK);
        CHECK_EQ_INT(memcmp(tokens, expected, sizeof expected), 0);
        ml_corpus_close(corpus);
    }
    room_leave(&r);
}

TEST(data, writers_refuse) {
    static const uint32_t large = 70000;
    ml_writer *writer;
    data_room r;
    room_enter(&r);
    CHECK_STATUS(ml_writer_open(room_path(&r, "a.bin"), ML_WRITE_PLAIN, 2, &writer), ML_OK);
    CHECK_STATUS(ml_writer_add(writer, &large, 1), ML_IO);
    room_check_error(&r, "token 70000 does not fit the 2 bytes of a token in DIR/a.bin");
    CHECK_STATUS(ml_writer_close(writer, false), ML_OK);
    CHECK(access(r.path, F_OK) != 0);
    CHECK_STATUS(ml_writer_open(room_path(&r, "a.txt"), ML_WRITE_PLAIN, 2, &writer), ML_INVALID);
    CHECK_STATUS(ml_writer_open("/nowhere/a.bin", ML_WRITE_PLAIN, 2, &writer), ML_IO);
    room_leave(&r); /* which fails where a temporary file is left */
}

/* Bytes that the process reads, by the kernel's count. */
static int64_t bytes_read(void) {
    char text[512] = "";
    FILE *file = fopen("/proc/self/io", "r");
    if (!file) test_skip("no /proc/self/io");
    size_t count = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    REQUIRE(count > 0 && strncmp(text, "rchar: ", 7) == 0);
    return atoll(text + 7);
}

/* An index of documents of unequal lengths is opened without reading it, and a sample is drawn. */
static void open_large(int64_t documents) {
    data_room r;
    ml_writer *writer;
    ml_corpus *corpus = NULL;
    uint32_t ids[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    int32_t tokens[65];
    room_enter(&r);
    CHECK_STATUS(ml_writer_open(room_path(&r, "large.bin"), ML_WRITE_MEGATRON, 1, &writer), ML_OK);
    for (int64_t i = 0; i < documents; i++) {
        if (ml_writer_add(writer, ids, 1 + i * 7919 % 8) != ML_OK) break;
        if (ml_writer_end_document(writer) != ML_OK) break;
    }
    CHECK_STATUS(ml_writer_close(writer, true), ML_OK);
    int64_t before = bytes_read();
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    CHECK_STATUS(ml_corpus_open(room_path(&r, "large"), ML_CORPUS_BY_NAME, NULL, &corpus), ML_OK);
    REQUIRE(corpus != NULL);
    ml_corpus_range range = {.to = 1};
    CHECK_STATUS(ml_corpus_sample(corpus, &range, 12345, 64, tokens, NULL), ML_OK);
    clock_gettime(CLOCK_MONOTONIC, &end);
    int64_t read = bytes_read() - before;
    double seconds =
        (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
    if (documents > 1000000)
        printf("%lld documents: a sample after %.3f s and %lld bytes\n", (long long)documents,
               seconds, (long long)read);
    CHECK(documents < 1000000 || seconds < 1);
    EXPECT(read < 1 << 20, "%lld bytes of %lld documents were read", (long long)read,
           (long long)documents);
    CHECK_EQ_INT(ml_corpus_documents(corpus), documents);
    ml_corpus_close(corpus);
    room_leave(&r);
}

TEST(data, an_index_is_not_read_whole) {
    open_large(100000);
}

TEST(long, an_index_of_1e8_documents) {
    open_large(100000000);
}

TEST(data, identity_of_files) {
    char before[1024];
    ml_corpus *corpus = NULL;
    data_room r;
    room_enter(&r);
    for (int i = 0; i < 3; i++) {
        ml_bytes text = {0};
        room_put(&r, "a.txt", "wb", i == 2 ? "some texT" : "some text", 9);
        CHECK_STATUS(ml_corpus_open(r.path, ML_CORPUS_BY_NAME, NULL, &corpus), ML_OK);
        CHECK_STATUS(ml_corpus_identity(corpus, &text), ML_OK);
        CHECK_STATUS(ml_bytes_add(&text, "", 1), ML_OK);
        static const char begin[] =
            "{\"tokenizer\":\"bytes\",\"sources\":[{\"weight\":1,\"files\":[{\"name\":\"a.txt\","
            "\"tokens\":9,\"bytes\":9,\"hash\":\"";
        CHECK(strncmp(text.at, begin, sizeof begin - 1) == 0);
        if (i > 0) CHECK_EQ_INT(strcmp(text.at, before) == 0, i == 1);
        snprintf(before, sizeof before, "%s", text.at);
        ml_bytes_free(&text);
        ml_corpus_close(corpus);
    }
    room_leave(&r);
}
