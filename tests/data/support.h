/* A folder of files that a test makes by hand. */
#ifndef ML_TEST_DATA_H
#define ML_TEST_DATA_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    char folder[64], path[128]; /* path: of the last file that was named */
} data_room;

void room_enter(data_room *r);
void room_leave(data_room *r);                         /* removes the files too */
const char *room_path(data_room *r, const char *name); /* valid until the next one */
/* Bytes to a file of the room; `mode` as fopen's. */
const char *room_put(data_room *r, const char *name, const char *mode, const void *bytes,
                     size_t count);
void room_check_error(const data_room *r, const char *expected); /* with DIR for the folder */
void room_put_index(data_room *r, const char *name, int code, const int32_t *lengths, int64_t count,
                    int width);

#endif
