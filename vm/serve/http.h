/* An HTTP server whose requests one thread of the program answers.
 *
 * libmicrohttpd's thread accepts connections, checks and reads requests, and sends answers. What it
 * cannot answer by itself (routes) waits, as an event with an id, for the thread that calls the
 * functions below; its connection is suspended meanwhile. Every function but http_start and
 * http_stop may be called for an id whose client has left: it then does nothing. */
#ifndef SERVE_HTTP_H
#define SERVE_HTTP_H

#include <jansson.h>
#include <stddef.h>

#include "runtime/base/status.h"

typedef struct http_server http_server;

typedef struct {
    const char *host;     /* an address or a name */
    int port;             /* 0: any that is free */
    const char *token;    /* "Authorization: Bearer TOKEN" is required; NULL: of loopback alone */
    size_t most_body;     /* bytes of one request */
    size_t most_waiting;  /* bytes of all requests that were not answered yet */
    int most_connections; /* others are closed at once */
    int idle_seconds;     /* after which a connection that neither sends nor reads is closed */
} http_options;

/* Listen. ML_INVALID where the address is not loopback and there is no token, ML_IO where it cannot
 * be listened on, ML_DEVICE without the library. */
ml_status http_start(const http_options *options, http_server **server);
int http_port(const http_server *server);

/* The answer to every GET of a path, from now on; `open`: without a token too. The bytes are
 * copied. */
ml_status http_page(http_server *server, const char *path, int status, const char *type,
                    const char *text, size_t size, bool open);
/* Requests of this method ("GET" or "POST") and path become events. A POST's body is JSON: an
 * object. Before the first event only. */
ml_status http_route(http_server *server, const char *method, const char *path);

typedef struct {
    int64_t id;
    bool left;        /* the client went away, after the event of its request and before the end */
    const char *path; /* the route's */
    json_t *body;     /* of a POST; owned by the caller, json_decref */
} http_event;
/* Wait at most that many seconds until there is an event. */
void http_wait(http_server *server, double seconds);
bool http_next(http_server *server, http_event *event);

/* The whole answer of a request. Of one that has begun as a stream the connection is closed. */
ml_status http_reply(http_server *server, int64_t id, int status, const char *type,
                     const char *text, size_t size);
/* An error as OpenAI's API has it; `parameter` and `code` may be NULL. */
ml_status http_refuse(http_server *server, int64_t id, int status, const char *message,
                      const char *parameter, const char *code);
/* A part of an answer that is sent as it is made (text/event-stream); http_finish ends it. */
ml_status http_chunk(http_server *server, int64_t id, const char *text, size_t size);
void http_finish(http_server *server, int64_t id);

/* Accept no more connections, and refuse new requests with 503. */
void http_drain(http_server *server);
/* Whether an answer has not been sent whole. */
bool http_sending(http_server *server);
/* Close all connections; frees the server. NULL is none. */
void http_stop(http_server *server);

#endif
