/* libmicrohttpd (version 0.9.71 or later), opened when a server starts. */
#ifndef SERVE_LIBRARY_H
#define SERVE_LIBRARY_H

#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>

#include "runtime/base/status.h"

#if __has_include(<microhttpd.h>) && !defined(MLUA_NO_MICROHTTPD_HEADER)
#include <microhttpd.h>
#else
/* What is used of it, which has not changed since that version. */
struct MHD_Daemon;
struct MHD_Connection;
struct MHD_Response;
enum MHD_Result { MHD_NO, MHD_YES };
enum MHD_FLAG {
    MHD_USE_INTERNAL_POLLING_THREAD = 8,
    MHD_USE_POLL = 64,
    MHD_USE_ITC = 1024,
    MHD_ALLOW_SUSPEND_RESUME = 8192 | MHD_USE_ITC
};
enum MHD_OPTION {
    MHD_OPTION_END,
    MHD_OPTION_CONNECTION_LIMIT = 2,
    MHD_OPTION_CONNECTION_TIMEOUT = 3,
    MHD_OPTION_NOTIFY_COMPLETED = 4,
    MHD_OPTION_LISTEN_SOCKET = 12
};
enum MHD_ValueKind { MHD_HEADER_KIND = 1 };
enum MHD_ResponseMemoryMode { MHD_RESPMEM_MUST_COPY = 2 };
enum MHD_RequestTerminationCode { MHD_REQUEST_TERMINATED_COMPLETED_OK };
enum MHD_ConnectionInfoType { MHD_CONNECTION_INFO_CONNECTION_FD = 6 };
union MHD_ConnectionInfo {
    int connect_fd;
    const void *pointer;
};
#define MHD_SIZE_UNKNOWN ((uint64_t)-1)
#define MHD_CONTENT_READER_END_OF_STREAM ((ssize_t)-1)
#define MHD_CONTENT_READER_END_WITH_ERROR ((ssize_t)-2)
typedef enum MHD_Result (*MHD_AcceptPolicyCallback)(void *, const struct sockaddr *, unsigned);
typedef enum MHD_Result (*MHD_AccessHandlerCallback)(void *, struct MHD_Connection *, const char *,
                                                     const char *, const char *, const char *,
                                                     size_t *, void **);
typedef ssize_t (*MHD_ContentReaderCallback)(void *, uint64_t, char *, size_t);
typedef void (*MHD_ContentReaderFreeCallback)(void *);
struct MHD_Daemon *MHD_start_daemon(unsigned, uint16_t, MHD_AcceptPolicyCallback, void *,
                                    MHD_AccessHandlerCallback, void *, ...);
int MHD_quiesce_daemon(struct MHD_Daemon *);
void MHD_stop_daemon(struct MHD_Daemon *);
void MHD_suspend_connection(struct MHD_Connection *);
void MHD_resume_connection(struct MHD_Connection *);
const char *MHD_lookup_connection_value(struct MHD_Connection *, enum MHD_ValueKind, const char *);
const union MHD_ConnectionInfo *MHD_get_connection_info(struct MHD_Connection *,
                                                        enum MHD_ConnectionInfoType, ...);
struct MHD_Response *MHD_create_response_from_buffer(size_t, void *, enum MHD_ResponseMemoryMode);
struct MHD_Response *MHD_create_response_from_callback(uint64_t, size_t, MHD_ContentReaderCallback,
                                                       void *, MHD_ContentReaderFreeCallback);
enum MHD_Result MHD_add_response_header(struct MHD_Response *, const char *, const char *);
enum MHD_Result MHD_queue_response(struct MHD_Connection *, unsigned, struct MHD_Response *);
void MHD_destroy_response(struct MHD_Response *);
#endif

/* clang-format off */
#define HTTP_CALLS(X)                                                                              \
    X(start_daemon) X(quiesce_daemon) X(stop_daemon) X(suspend_connection) X(resume_connection)    \
    X(lookup_connection_value) X(get_connection_info) X(create_response_from_buffer)               \
    X(create_response_from_callback) X(add_response_header) X(queue_response) X(destroy_response)
/* clang-format on */

typedef struct {
#define HTTP_DECLARE(name) __typeof__(MHD_##name) *name;
    HTTP_CALLS(HTTP_DECLARE)
#undef HTTP_DECLARE
} http_library;

/* The library, opened at the first call. ML_DEVICE where it is absent; the error names the package.
 */
ml_status http_library_open(const http_library **library);

#endif
