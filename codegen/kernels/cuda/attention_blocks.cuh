/* What the masks of a score function show of blocks of 64 queries by 64 keys: a byte each in
 * workspace, [batch][head, where masks differ by head][block of queries][block of keys]. */
#pragma once
#ifndef MLUA_EMBEDDED
#define STATES_AT 5
#define MASKED_BY_HEAD 0
#endif
#include "attention.cuh"

#define SHOWN_PARTLY 1 /* 0: nothing */
#define SHOWN_WHOLE 2
#define QUERY_PARTS ((SEQ + 63) / 64)
#define KEY_PARTS ((KV_SEQ + 63) / 64)
#if MASKED_BY_HEAD
#define MASK_HEADS HEADS
#define MASK_HEAD head
#else
#define MASK_HEADS 1
#define MASK_HEAD 0
#endif
