/* What machines reach: the one place of the numbers that estimates are made from.
 *
 * Estimates decide the order of steps, what is recomputed and which layers make a stage; they must
 * be the same on every rank, so they speak of one machine (ml_machine_planned, an H200) whatever
 * the device is, but for the speed of links (ml_target, codegen/target.h), on which ranks agree.
 * Each number says whether it was measured, is from a vendor's data sheet, or is assumed. */
#ifndef ML_MACHINE_H
#define ML_MACHINE_H

#include <stdbool.h>
#include <stdint.h>

/* Known GPUs, for planning without one and for model FLOP utilisation. From data sheets. */
typedef struct {
    const char *key;   /* the value of --device in a check: "h200" */
    const char *model; /* a part of the driver's name for it */
    int arch, multiprocessors;
    double memory_gib; /* what the driver leaves to programs, about */
    double tflops;     /* dense bf16 products */
    bool nvlink;       /* joins those of a host */
} ml_gpu;
extern const ml_gpu ml_gpus[]; /* the first one is the H200; a row without a key ends it */

/* Bytes of a GPU that a process takes beside its plans. */
typedef struct {
    int64_t context;       /* the driver's */
    int64_t libraries;     /* left for their code and memory */
    int64_t communicators; /* of several ranks, and rings for messages: what they may take */
    int64_t copies;        /* likewise, at most: buffers of copies between GPUs of a host */
} ml_outside;
extern const ml_outside ml_gpu_outside;
/* What is set aside for communicators where a context and libraries leave so much: nothing of a few
 * GiB, and never so much that more memory leaves less to plans. */
int64_t ml_communicator_bytes(int64_t left);
/* And for copies between GPUs of a host. */
int64_t ml_copy_bytes(int64_t left);
/* What a process, one of several ranks or alone, that has so many bytes leaves to its plans; and
 * what it takes where these take so many. */
int64_t ml_plan_bytes(int64_t process, bool several);
int64_t ml_process_bytes(int64_t plans, bool several);

typedef struct {
    double product_flops;     /* a second, of bf16 products */
    double memory_bytes;      /* a second, of kernels that wait for memory */
    double flops_per_byte;    /* of products, in the time in which memory moves a byte */
    double launch_seconds;    /* of a kernel, whatever it does */
    double link_bytes;        /* a second, one way, between GPUs of a host */
    double link_share;        /* of a link's speed on the data sheet that collectives reach */
    double network_bytes;     /* a second, of collectives between hosts, for each GPU */
    double wait_seconds;      /* of a collective, before its first byte has arrived */
    double host_memory_bytes; /* a second, of copies of all GPUs of a socket in one direction */
    double host_both_bytes;   /* and of those in both directions at once, together */
    int host_sockets;
    double host_beside; /* computation is so much longer beside a copy to or from the host */
    int host_gpus, multiprocessors;
} ml_machine;
extern const ml_machine ml_machine_planned;
/* The same of devices and links that reach a small part of what they should: what a rank takes at
 * most. On CPUs product_flops is of a whole process. */
extern const ml_machine ml_machine_slowest_gpu, ml_machine_slowest_cpu;

/* Bytes a second, one way, from data sheets: NVLink of GPUs of this architecture; PCIe. */
int64_t ml_machine_link(int arch, bool nvlink);
/* Bytes a second that a GPU of this architecture copies to pinned host memory, and as many back at
 * the same time. */
int64_t ml_machine_host(int arch);

#endif
