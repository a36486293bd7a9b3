/* mlua serve as a process of its own, and its clients. */
#ifndef ML_TESTS_SERVING_H
#define ML_TESTS_SERVING_H

#include "tests/process/support.h"

enum { SERVING_ANSWER = 1 << 17, SERVING_SECONDS = 30 };

typedef struct {
    process_room *room;
    int pid, port;
} serving;

/* Write "net.lua", a small model (with offline=FILE it answers the requests of a file, one after
 * the other, into expected.json), and train it with these settings into the folder "run". Skips the
 * test where there is no libmicrohttpd. */
void serving_train(process_room *room, const char *settings);
/* Serve it on a port that is free; the server's output is the file "out". */
serving serving_start(process_room *room, const char *environment, const char *options);
/* By SIGTERM; the exit code. */
int serving_stop(serving *s);

/* None of these raises: they may run in threads. */
int serving_connect(int port); /* -1: refused */
bool serving_send(int fd, const char *text, size_t size);
bool serving_post(int fd, const char *path, const char *body);
/* All that the server sends until it closes, in SERVING_ANSWER bytes; false where it does not
 * within the time. */
bool serving_receive(int fd, char *answer);
/* The body of an answer, its chunks joined in place. */
char *serving_body(char *answer);

#endif
