/* Data files: what is read at which place, and files that change while they are read. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "runtime/io/file.h"
#include "runtime/io/safetensors.h"
#include "tests/test.h"

typedef struct {
    char folder[32], path[64];
} room;

static void enter(room *r, const char *name) {
    strcpy(r->folder, "/tmp/mlua-test-XXXXXX");
    REQUIRE(mkdtemp(r->folder) != NULL);
    snprintf(r->path, sizeof r->path, "%s/%s", r->folder, name);
}

static void leave(room *r) {
    unlink(r->path);
    CHECK_EQ_INT(rmdir(r->folder), 0);
}

static void put(const room *r, const char *mode, int64_t offset, const void *bytes, size_t count) {
    FILE *file = fopen(r->path, mode);
    REQUIRE(file != NULL);
    fseek(file, offset, SEEK_SET);
    CHECK_EQ_INT((int64_t)fwrite(bytes, 1, count, file), (int64_t)count);
    CHECK_EQ_INT(fclose(file), 0);
}

/* The text of the last error with FILE in the place of its path. */
static void check_message(const room *r, const char *expected) {
    char message[512];
    const char *text = ml_error_last()->text, *at = strstr(text, r->path);
    REQUIRE(at != NULL);
    snprintf(message, sizeof message, "%.*sFILE%s", (int)(at - text), text, at + strlen(r->path));
    CHECK_TEXT(message, expected);
}

TEST(io, a_tensor_file_that_is_shortened) {
    static const char header[] = "{\"w\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}";
    const uint64_t length = sizeof header - 1;
    const float values[2] = {1.5f, -2}, *read = (float[2]){0};
    room r;
    enter(&r, "w.safetensors");
    put(&r, "wb", 0, &length, 8);
    put(&r, "ab", 0, header, length);
    put(&r, "ab", 0, values, 8);
    ml_safetensors *file;
    CHECK_STATUS(ml_safetensors_open(r.path, &file), ML_OK);
    CHECK_EQ_INT(file->count, 1);
    CHECK_STATUS(ml_safetensors_read(file, &file->tensor[0], (void *)read), ML_OK);
    CHECK_EQ_INT(memcmp(read, values, 8), 0);
    REQUIRE(truncate(r.path, (off_t)length + 12) == 0);
    CHECK_STATUS(ml_safetensors_read(file, &file->tensor[0], (void *)read), ML_IO);
    check_message(
        &r, "tensor \"w\": FILE ends before byte 66: it was 70 bytes long when it was opened, "
            "and was shortened since");
    ml_safetensors_close(file);
    leave(&r);
}

TEST(io, a_socket_is_refused) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    ml_file file;
    room r;
    enter(&r, "socket");
    strcpy(address.sun_path, r.path);
    int descriptor = socket(AF_UNIX, SOCK_STREAM, 0);
    REQUIRE(descriptor >= 0 && bind(descriptor, (void *)&address, sizeof address) == 0);
    CHECK_STATUS(ml_file_open(r.path, &file), ML_IO);
    check_message(&r, "cannot read data from FILE: it is a socket");
    close(descriptor);
    leave(&r);
}
