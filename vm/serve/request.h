/* The requests of an HTTP server, which two threads share: http.c is the program's side,
 * connection.c the library's. */
#ifndef SERVE_REQUEST_H
#define SERVE_REQUEST_H

#include <jansson.h>
#include <poll.h>
#include <pthread.h>
#include <stddef.h>

#include "vm/serve/library.h"

typedef struct http_server http_server;
typedef struct http_request http_request;

typedef struct {
    char *at;
    size_t size, room;
} http_bytes;
/* False where there is no memory. */
bool http_append(http_bytes *bytes, const char *text, size_t size);

typedef struct http_path {
    struct http_path *next;
    char *method, *path;
    bool is_page, open;
    int status; /* of a page, as the next two */
    char *type;
    http_bytes text;
} http_path;

typedef struct {
    http_request *first, *last;
} http_queue;

enum http_stage {
    HTTP_RECEIVING, /* its body */
    HTTP_WAITING,   /* for what the program answers */
    HTTP_REPLIED,   /* the answer is `out` */
    HTTP_STREAMING  /* `out` is what was not sent yet */
};

struct http_request {
    http_server *server;
    http_request *next; /* in a queue */
    int64_t id;
    struct MHD_Connection *connection; /* NULL: the exchange is over */
    int socket;
    enum http_stage stage;
    bool suspended, left; /* the connection; its client */
    bool arrived;         /* it waits in server->arrived */
    bool given;           /* the program has its event, and has not ended its answer */
    bool ended;           /* a stream, by the program */
    const http_path *path;
    size_t charged; /* bytes of `body` that server->waiting_bytes counts */
    http_bytes body, out;
    json_t *value;
    size_t sent; /* of out */
    int status;
    const char *type;
};

struct http_server {
    const http_library *library;
    struct MHD_Daemon *daemon;
    size_t most_body, most_waiting; /* as http_options has them */
    char *token;                    /* a copy; NULL: none */
    int port;
    pthread_mutex_t lock; /* of everything below */
    pthread_cond_t changed;
    http_path *paths;
    http_queue arrived, left; /* events */
    http_request **places;    /* requests by id % place_count; NULL: none */
    struct pollfd *sockets;   /* room for place_count */
    http_request **watched;   /* whose they are */
    int place_count, live;
    int64_t serial;
    size_t waiting_bytes;
    double looked; /* when clients were looked after last */
    bool draining, stopping;
};

/* All below with the lock held, but http_append. */
void http_resume(http_request *r);
void http_release(http_request *r);
void http_push(http_queue *queue, http_request *r);
void http_remove(http_queue *queue, http_request *r);
/* The answer is this error. */
bool http_set_error(http_request *r, int status, const char *message, const char *parameter,
                    const char *code);
bool http_set_reply(http_request *r, int status, const char *type, const char *text, size_t size);

#endif
