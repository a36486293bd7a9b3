/* Files of checkpoints: places of tensors, hashes that do not depend on cuts, manifests that are
 * damaged, folders of checkpoints, renames. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/io/checkpoint_list.h"
#include "runtime/io/durable.h"
#include "runtime/io/safetensors.h"
#include "runtime/io/tensor_hash.h"
#include "tests/test.h"

enum { PATH = 256 };

static void folder_new(char path[PATH]) {
    strcpy(path, "/tmp/mlua-test-XXXXXX");
    REQUIRE(mkdtemp(path) != NULL);
}

TEST(io, tensor_hash_of_any_cut) {
    uint64_t seed = 3;
    unsigned char bytes[4096];
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (unsigned char)test_random(&seed);
    for (int width = 1; width <= 8; width *= 2) {
        const int64_t count = (int64_t)sizeof bytes / width;
        const uint64_t whole = ml_tensor_hash(bytes, width, 0, count);
        for (int turn = 0; turn < 20; turn++) {
            uint64_t sum = 0;
            for (int64_t at = 0, more; at < count; at += more) {
                more = test_range(&seed, 1, count - at);
                sum += ml_tensor_hash(bytes + at * width, width, at, more);
            }
            CHECK(sum == whole);
            int64_t bit = test_range(&seed, 0, (int64_t)sizeof bytes * 8 - 1);
            bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
            CHECK(ml_tensor_hash(bytes, width, 0, count) != whole);
            bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
        }
    }
}

/* A checkpoint of small tensors, whose element i of tensor t is t + i; placed and written. */
static ml_manifest *manifest_new(void) {
    static const struct {
        const char *name;
        ml_dtype dtype;
        bool model;
        int64_t size;
    } tensors[] = {{"wq", ML_F32, true, 6},
                   {"a \"quoted\"\n\xc3\xa9", ML_F32, true, 5},
                   {"flags", ML_BOOL, true, 3},
                   {"count", ML_I64, false, 1},
                   {"wq.m", ML_F32, false, 6}};
    enum { COUNT = sizeof tensors / sizeof *tensors };
    ml_manifest *m;
    CHECK_STATUS(ml_manifest_new(&m), ML_OK);
    m->record = "{\"step\":7,\"note\":\"n\"}";
    m->tensors = ML_NEW_ARRAY(m->arena, ml_manifest_tensor, COUNT);
    for (int i = 0; i < COUNT; i++)
        m->tensors[m->tensor_count++] = (ml_manifest_tensor){.name = tensors[i].name,
                                                             .dtype = tensors[i].dtype,
                                                             .model = tensors[i].model,
                                                             .rank = 1,
                                                             .axis = {"x"},
                                                             .size = {tensors[i].size}};
    return m;
}

static void checkpoint_write(const char *folder, int64_t limit) {
    char name[2 * PATH], bytes[64] = {0};
    const char *text;
    int file;
    ml_manifest *m = manifest_new();
    CHECK_STATUS(ml_manifest_place(m, limit), ML_OK);
    REQUIRE(mkdir(folder, 0777) == 0);
    for (int i = 0; i < m->file_count; i++) {
        snprintf(name, sizeof name, "%s/%s", folder, m->files[i].name);
        CHECK_STATUS(ml_durable_file(name, m->files[i].text, (size_t)m->files[i].head), ML_OK);
        REQUIRE(truncate(name, m->files[i].bytes) == 0);
    }
    for (int i = 0; i < m->tensor_count; i++) {
        ml_manifest_tensor *t = &m->tensors[i];
        snprintf(name, sizeof name, "%s/%s", folder, m->files[t->file].name);
        CHECK_STATUS(ml_durable_open(name, &file), ML_OK);
        memset(bytes, i, sizeof bytes);
        CHECK_STATUS(ml_durable_write(file, name, t->offset, bytes, t->bytes), ML_OK);
        close(file);
        t->hash = ml_tensor_hash(bytes, ml_dtypes[t->dtype].bytes, 0, t->size[0]);
    }
    CHECK_STATUS(ml_manifest_text(m, &text), ML_OK);
    snprintf(name, sizeof name, "%s/manifest.json", folder);
    CHECK_STATUS(ml_durable_file(name, text, strlen(text)), ML_OK);
    ml_manifest_free(m);
}

static void manifest_check(const char *folder, int files) {
    ml_manifest *m;
    ml_safetensors *file;
    char name[2 * PATH];
    CHECK_STATUS(ml_manifest_read(folder, &m), ML_OK);
    REQUIRE(m != NULL);
    CHECK_TEXT(m->record, "{\"step\":7,\"note\":\"n\"}");
    CHECK_EQ_INT(m->tensor_count, 5);
    CHECK_EQ_INT(m->file_count, files);
    CHECK(ml_manifest_find(m, "nothing") == NULL);
    for (int i = 0; i < m->tensor_count; i++) {
        const ml_manifest_tensor *t = ml_manifest_find(m, m->tensors[i].name);
        REQUIRE(t == &m->tensors[i]);
        CHECK_TEXT(t->axis[0], "x");
        /* as others read it */
        snprintf(name, sizeof name, "%s/%s", folder, m->files[t->file].name);
        CHECK_STATUS(ml_safetensors_open(name, &file), ML_OK);
        bool found = false;
        for (int k = 0; file != NULL && k < file->count; k++)
            found =
                found || (strcmp(file->tensor[k].name, t->name) == 0 &&
                          file->tensor[k].offset == t->offset &&
                          file->tensor[k].bytes == t->bytes && file->tensor[k].dtype == t->dtype);
        CHECK(found);
        ml_safetensors_close(file);
    }
    ml_manifest_free(m);
}

TEST(io, manifest_there_and_back) {
    char room[PATH], folder[2 * PATH];
    folder_new(room);
    snprintf(folder, sizeof folder, "%s/ck", room);
    for (int limit = 1; limit <= 1 << 20; limit *= 32) {
        checkpoint_write(folder, limit);
        manifest_check(folder, limit == 1 ? 6 : limit == 32 ? 4 : 3);
        CHECK_STATUS(ml_durable_remove(folder), ML_OK);
    }
    CHECK_EQ_INT(rmdir(room), 0);
}

/* Each byte of the manifest and of heads, changed: named; and files of another size. */
TEST(io, manifest_damaged) {
    char room[PATH], folder[2 * PATH], name[3 * PATH];
    folder_new(room);
    snprintf(folder, sizeof folder, "%s/ck", room);
    checkpoint_write(folder, 1 << 20);
    ml_manifest *whole, *m;
    CHECK_STATUS(ml_manifest_read(folder, &whole), ML_OK);
    for (int f = -1; f < whole->file_count; f++) {
        const char *file = f < 0 ? "manifest.json" : whole->files[f].name;
        snprintf(name, sizeof name, "%s/%s", folder, file);
        struct stat info;
        REQUIRE(stat(name, &info) == 0);
        const int64_t head = f < 0 ? info.st_size : whole->files[f].head;
        int descriptor = open(name, O_RDWR);
        for (int64_t at = 0; at < head; at += at < 40 ? 1 : 7) {
            char byte, other;
            REQUIRE(pread(descriptor, &byte, 1, at) == 1);
            other = byte ^ 4;
            REQUIRE(pwrite(descriptor, &other, 1, at) == 1);
            CHECK_STATUS(ml_manifest_read(folder, &m), ML_IO);
            CHECK(strstr(ml_error_last()->text, file) != NULL);
            REQUIRE(pwrite(descriptor, &byte, 1, at) == 1);
        }
        REQUIRE(ftruncate(descriptor, info.st_size - 1) == 0);
        CHECK_STATUS(ml_manifest_read(folder, &m), ML_IO);
        CHECK(strstr(ml_error_last()->text, file) != NULL);
        close(descriptor);
        CHECK_STATUS(ml_durable_remove(folder), ML_OK);
        checkpoint_write(folder, 1 << 20);
    }
    ml_manifest_free(whole);
    CHECK_STATUS(ml_durable_remove(folder), ML_OK);
    CHECK_EQ_INT(rmdir(room), 0);
}

TEST(io, checkpoint_list) {
    char room[PATH], name[3 * PATH], temporary[3 * PATH];
    folder_new(room);
    static const char *const folders[] = {"step-00000007", "b", "step-00000012"};
    for (int i = 0; i < 3; i++) {
        snprintf(name, sizeof name, "%s/%s", room, folders[i]);
        checkpoint_write(name, 1 << 20);
    }
    snprintf(name, sizeof name, "%s/step-00000012/manifest.json", room);
    CHECK_STATUS(ml_durable_unlink(name), ML_OK);
    snprintf(name, sizeof name, "%s/step-00000020", room);
    ml_checkpoint_temporary(name, 0xabcdef, temporary);
    checkpoint_write(temporary, 1 << 20);
    ml_arena *arena = ml_arena_new();
    ml_checkpoint_listing list;
    CHECK_STATUS(ml_checkpoint_folders(room, arena, &list), ML_OK);
    REQUIRE(list.count == 3);
    CHECK(!list.at[0].whole && list.at[0].step == 12);
    CHECK(strstr(list.at[0].problem, "it has no manifest.json") != NULL);
    CHECK(list.at[1].whole && list.at[1].step == 7 && list.at[2].step == 7);
    CHECK_STATUS(ml_checkpoint_sweep(room, "step-0000002"), ML_OK);
    CHECK_EQ_INT(access(temporary, F_OK), 0);
    CHECK_STATUS(ml_checkpoint_sweep(room, NULL), ML_OK);
    CHECK_EQ_INT(access(temporary, F_OK), -1);
    for (int i = 0; i < 3; i++) {
        snprintf(name, sizeof name, "%s/%s", room, folders[i]);
        CHECK_STATUS(ml_durable_remove(name), ML_OK);
        CHECK_STATUS(ml_durable_remove(name), ML_OK); /* there is none */
    }
    CHECK_EQ_INT(rmdir(room), 0);
    CHECK_STATUS(ml_checkpoint_folders(room, arena, &list), ML_OK);
    CHECK_EQ_INT(list.count, 0);
    ml_arena_free(arena);
}

/* Of two new folders both are synced into the ones that they lie in; one that is there costs
 * nothing. */
TEST(io, durable_folders) {
    char room[PATH], path[2 * PATH];
    folder_new(room);
    snprintf(path, sizeof path, "%s/a//b/", room);
    int64_t before = ml_durable_fault(0);
    CHECK_STATUS(ml_durable_folders(path), ML_OK);
    CHECK_EQ_INT(ml_durable_fault(0) - before, 4);
    CHECK_STATUS(ml_durable_folders(path), ML_OK);
    CHECK_EQ_INT(ml_durable_fault(0) - before, 4);
    CHECK_STATUS(ml_durable_folders("/dev/null/a"), ML_IO);
    CHECK(strstr(ml_error_last()->text, "cannot make the folder /dev/null/a: Not a directory"));
    path[strlen(path) - 1] = 0;
    CHECK_EQ_INT(rmdir(path), 0);
    snprintf(path, sizeof path, "%s/a", room);
    CHECK_EQ_INT(rmdir(path), 0);
    CHECK_EQ_INT(rmdir(room), 0);
}

/* A name is given, or exchanged; a fault ends the process before the operation of its number. */
TEST(io, durable_rename_and_fault) {
    char room[PATH], a[2 * PATH], b[2 * PATH];
    bool swapped;
    folder_new(room);
    snprintf(a, sizeof a, "%s/a", room);
    snprintf(b, sizeof b, "%s/b", room);
    checkpoint_write(a, 1 << 20);
    CHECK_STATUS(ml_durable_rename(a, b, &swapped), ML_OK);
    CHECK(!swapped);
    CHECK_STATUS(ml_durable_folder(a), ML_OK);
    CHECK_STATUS(ml_durable_folder(a), ML_IO);
    CHECK_STATUS(ml_durable_rename(a, b, &swapped), ML_OK);
    CHECK(swapped);
    manifest_check(a, 3);
    CHECK_STATUS(ml_durable_sync_parent(a), ML_OK);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        ml_durable_fault(2);
        ml_durable_remove(b);
        ml_durable_folder(b);
        _exit(0);
    }
    int status;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    CHECK_EQ_INT(access(b, F_OK), -1);
    CHECK_STATUS(ml_durable_remove(a), ML_OK);
    CHECK_EQ_INT(rmdir(room), 0);
}
