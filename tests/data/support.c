#include "tests/data/support.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/test.h"

void room_enter(data_room *r) {
    strcpy(r->folder, "/tmp/mlua-test-XXXXXX");
    REQUIRE(mkdtemp(r->folder) != NULL);
}

void room_leave(data_room *r) {
    DIR *dir = opendir(r->folder);
    REQUIRE(dir != NULL);
    for (struct dirent *entry; (entry = readdir(dir));)
        if (entry->d_name[0] != '.') unlink(room_path(r, entry->d_name));
    closedir(dir);
    CHECK_EQ_INT(rmdir(r->folder), 0);
}

const char *room_path(data_room *r, const char *name) {
    snprintf(r->path, sizeof r->path, "%s/%.60s", r->folder, name);
    return r->path;
}

const char *room_put(data_room *r, const char *name, const char *mode, const void *bytes,
                     size_t count) {
    FILE *file = fopen(room_path(r, name), mode);
    REQUIRE(file != NULL);
    CHECK_EQ_INT((int64_t)fwrite(bytes, 1, count, file), (int64_t)count);
    CHECK_EQ_INT(fclose(file), 0);
    return r->path;
}

void room_check_error(const data_room *r, const char *expected) {
    char message[8192] = "";
    size_t length = strlen(r->folder);
    const char *text = ml_error_last()->text;
    for (const char *at; (at = strstr(text, r->folder)); text = at + length)
        snprintf(message + strlen(message), sizeof message - strlen(message), "%.*sDIR",
                 (int)(at - text), text);
    snprintf(message + strlen(message), sizeof message - strlen(message), "%s", text);
    CHECK_TEXT(message, expected);
}

/* Field by field, as the format's description has it. */
void room_put_index(data_room *r, const char *name, int code, const int32_t *lengths, int64_t count,
                    int width) {
    const uint64_t version = 1, documents = (uint64_t)count + 1;
    const unsigned char dtype = (unsigned char)code;
    room_put(r, name, "wb", "MMIDIDX\0", 9);
    room_put(r, name, "ab", &version, 8);
    room_put(r, name, "ab", &dtype, 1);
    room_put(r, name, "ab", &count, 8);
    room_put(r, name, "ab", &documents, 8);
    room_put(r, name, "ab", lengths, (size_t)count * 4);
    for (int64_t i = 0, at = 0; i < count; at += (int64_t)lengths[i++] * width)
        room_put(r, name, "ab", &at, 8);
    for (int64_t i = 0; i <= count; i++) room_put(r, name, "ab", &i, 8);
}
