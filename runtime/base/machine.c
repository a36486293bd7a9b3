#include "runtime/base/machine.h"

#include <stddef.h>

const ml_gpu ml_gpus[] = {
    {"h200", "H200", 90, 132, 139.8, 989.5, true},
    {"h100", "H100", 90, 132, 79.1, 989.5, true},
    {"gh200", "GH200", 90, 132, 94.5, 989.5, true},
    {"b200", "B200", 100, 148, 178.0, 2250.0, true},
    {"a100", "A100", 80, 108, 79.2, 312.0, true},
    {"l40s", "L40S", 89, 142, 44.5, 362.0, false},
    {"rtx5090", "RTX 5090", 120, 170, 31.3, 209.5, false},
    {"rtx4090", "RTX 4090", 89, 128, 23.5, 165.2, false},
    {"rtx3090", "RTX 3090", 86, 82, 23.6, 71.0, false},
    {NULL, NULL, 0, 0, 0, 0, false},
};

const ml_outside ml_gpu_outside = {
    .context = (int64_t)532 << 20, /* measured: H200, driver 13.0 */
    .libraries = (int64_t)512 << 20,
    .communicators = (int64_t)1 << 30,
    .copies = (int64_t)128 << 20,
};

int64_t ml_communicator_bytes(int64_t left) {
    const int64_t most = ml_gpu_outside.communicators, beyond = left - 7 * most;
    return beyond < 0 ? 0 : beyond < most ? beyond : most;
}

int64_t ml_copy_bytes(int64_t plans) {
    return plans / 1024 < ml_gpu_outside.copies ? plans / 1024 : ml_gpu_outside.copies;
}

int64_t ml_plan_bytes(int64_t process, bool several) {
    const ml_outside *o = &ml_gpu_outside;
    int64_t left = process - o->context - o->libraries;
    if (left < 1) return 1;
    if (several) left -= ml_communicator_bytes(left);
    return several ? left - ml_copy_bytes(left) : left;
}

int64_t ml_process_bytes(int64_t plans, bool several) {
    const ml_outside *o = &ml_gpu_outside;
    int64_t all = plans + o->context + o->libraries;
    if (several && plans > 7 * o->communicators) all += o->communicators;
    return several ? all + ml_copy_bytes(plans) : all;
}

/* What an H200 was measured to reach is in comments: estimates are a little below. */
const ml_machine ml_machine_planned = {
    .product_flops = 600e12,    /* assumed; measured 660e12 to 800e12; data sheet 989e12 */
    .memory_bytes = 3.5e12,     /* assumed; measured 4.26e12 (copies); data sheet 4.8e12 */
    .flops_per_byte = 150,      /* assumed: near the ratio of these two */
    .launch_seconds = 3e-6,     /* assumed */
    .link_bytes = 450e9,        /* data sheet: NVLink 4 */
    .link_share = 5.0 / 9,      /* assumed; measured 346 GB/s of 450 (8 GPUs, large all-reduces) */
    .network_bytes = 40e9,      /* assumed: a 400 Gbit/s card for each GPU */
    .wait_seconds = 20e-6,      /* assumed */
    .host_memory_bytes = 126e9, /* measured: four H200s, 31.5e9 each (back 37.5e9); two: 52e9 */
    .host_both_bytes = 165e9,   /* measured: two 165e9, three 180e9, four 175e9 */
    .host_sockets = 2,          /* assumed */
    .host_beside = 0.02,        /* assumed: a copy takes 1 part in 90 of the memory's speed */
    .host_gpus = 8,             /* assumed */
    .multiprocessors = 132,     /* data sheet */
};

/* Assumed: a sixtieth of an H200, a slow link and a slow network. */
const ml_machine ml_machine_slowest_gpu = {
    .product_flops = 1e13,
    .link_bytes = 1e9,
    .network_bytes = 1e8,
};
/* Assumed: one core without vectors, shared with others. */
const ml_machine ml_machine_slowest_cpu = {.product_flops = 1e9};

int64_t ml_machine_host(int arch) {
    const int64_t giga = 1000000000;      /* 16 lanes of PCIe: generation 5 has 63, 4 has 31.5 */
    return (arch >= 90 ? 50 : 24) * giga; /* assumed: four fifths of that */
}

int64_t ml_machine_link(int arch, bool nvlink) {
    const int64_t giga = 1000000000, pcie = 32; /* generation 4, 16 lanes */
    return (!nvlink ? pcie : arch >= 100 ? 900 : arch >= 90 ? 450 : 300) * giga;
}
