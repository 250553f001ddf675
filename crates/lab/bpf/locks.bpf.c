/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Observes spin locks of a kernel UDP socket without a hook in the kernel's functions:
 * a timer looks whether a lock is held, and breakpoints see every write to a lock.
 *
 * The maps are filled by src/experiments/rivera/kernel_locks/observer.rs, which defines the same layouts.
 */
#include "kernel.h"

#define MAX_LOCKS 4
/* Byte of a queued spin lock that is not zero while the lock is held. */
#define HELD_MASK 0xff

static long (*bpf_probe_read_kernel)(void *to, u32 size, const void *from) = (void *)113;
static u64 (*bpf_get_current_pid_tgid)(void) = (void *)14;

struct targets {
	/* Thread whose next received datagram tells the socket's address. */
	u64 thread;
	/* Addresses of the locks; 0: none. */
	u64 locks[MAX_LOCKS];
};

struct observations {
	/* Address of the thread's socket. */
	u64 socket;
	/* Looks of the timer. */
	u64 samples;
	/* Looks that found the lock held. */
	u64 held[MAX_LOCKS];
	/* Writes after which the lock was free. */
	u64 released[MAX_LOCKS];
};

struct {
	NUMBER(type, BPF_MAP_TYPE_ARRAY);
	NUMBER(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct targets);
} targets SECTION(".maps");

struct {
	NUMBER(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	NUMBER(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct observations);
} observations SECTION(".maps");

/* Context of a perf event's program on x86-64 (linux/bpf_perf_event.h). */
struct perf_event_context {
	u64 registers[21];
	u64 sample_period;
	/* Address of the breakpoint. */
	u64 address;
};

INLINE int is_held(u64 lock)
{
	u32 word = 0;

	return !bpf_probe_read_kernel(&word, sizeof(word), (const void *)lock) &&
	       (word & HELD_MASK);
}

SECTION("perf_event")
int sample_locks(const void *context __attribute__((unused)))
{
	u32 key = 0;
	struct targets *target = bpf_map_lookup_elem(&targets, &key);
	struct observations *seen = bpf_map_lookup_elem(&observations, &key);

	if (!target || !seen)
		return 0;
	seen->samples++;
#pragma unroll
	for (int i = 0; i < MAX_LOCKS; i++)
		if (target->locks[i] && is_held(target->locks[i]))
			seen->held[i]++;
	return 0;
}

SECTION("perf_event")
int count_releases(struct perf_event_context *context)
{
	u32 key = 0;
	struct targets *target = bpf_map_lookup_elem(&targets, &key);
	struct observations *seen = bpf_map_lookup_elem(&observations, &key);
	u64 lock = context->address;

	if (!target || !seen || is_held(lock))
		return 0;
#pragma unroll
	for (int i = 0; i < MAX_LOCKS; i++)
		if (target->locks[i] == lock)
			seen->released[i]++;
	return 0;
}

SECTION("raw_tp/sock_recv_length")
int find_socket(const u64 *arguments)
{
	u32 key = 0;
	struct targets *target = bpf_map_lookup_elem(&targets, &key);
	struct observations *seen = bpf_map_lookup_elem(&observations, &key);

	if (target && seen && (u32)bpf_get_current_pid_tgid() == target->thread)
		seen->socket = arguments[0];
	return 0;
}

/* The kernel's memory is only read for programs under the GPL. */
static const char license_text[] SECTION("license") = "Dual MIT/GPL";
