/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Flood generator: the kernel runs this program repeatedly on frames of its own
 * (BPF_PROG_TEST_RUN with live frames); each run sends one frame or waits.
 *
 * The maps are filled by src/load/flood.rs, which defines the same layouts.
 */
#include "kernel.h"

/* Maximum frame length, in words of eight bytes: enough for a DNS query. */
#define FRAME_WORDS 16
#define MAX_FRAMES 16384
/*
 * Maximum number of frames sent in a burst after a delay of the program; the rest
 * is skipped, since no link carries a burst at many times its rate.
 */
#define BURST 64
/* Interval of a stopped flood. */
#define NEVER (~0ull)
/* Clock reads before a run ends without a frame: some ten microseconds. */
#define TURNS_MAX 256

static long (*bpf_redirect)(u32 interface, u64 flags) = (void *)23;

struct settings {
	/* Interface to send through; frames arrive at its peer. */
	u32 interface;
	/* Number of frames to send in rotation. */
	u32 frames;
	/* Incremented with every change of the schedule. */
	u64 version;
	/* Due time of the first frame, on the monotonic clock. */
	u64 start_ns;
	/* Time between two frames in 1/1024 ns; 0: as fast as possible. */
	u64 interval;
};

struct progress {
	/* Version of the schedule that `due` belongs to. */
	u64 version;
	/* Due time of the next frame, in 1/1024 ns after the start. */
	u64 due;
	/* Frames made and sent, accepted by the peer or not. */
	u64 sent;
	/* Index of the next frame. */
	u64 frame;
};

struct frame {
	u64 words[FRAME_WORDS];
};

struct {
	NUMBER(type, BPF_MAP_TYPE_ARRAY);
	NUMBER(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct settings);
} settings SECTION(".maps");

struct {
	NUMBER(type, BPF_MAP_TYPE_ARRAY);
	NUMBER(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct progress);
} progress SECTION(".maps");

struct {
	NUMBER(type, BPF_MAP_TYPE_ARRAY);
	NUMBER(max_entries, MAX_FRAMES);
	TYPE(key, u32);
	TYPE(value, struct frame);
} frames SECTION(".maps");

/*
 * Waits briefly until a frame is due, then advances the schedule by one frame. A
 * frame that is not sent returns to the kernel's pool, whose lock the receiver of
 * earlier frames takes as well: waiting here keeps that cost from the receiver.
 */
INLINE int is_due(const struct settings *set, struct progress *at)
{
	u64 elapsed = 0;
	int turn;

	if (set->interval == NEVER)
		return 0;
	if (at->version != set->version) {
		at->version = set->version;
		at->due = 0;
	}
	if (set->interval == 0)
		return 1;
	for (turn = 0; turn < TURNS_MAX; turn++) {
		elapsed = (bpf_ktime_get_ns() - set->start_ns) << 10;
		if (elapsed >= at->due)
			break;
	}
	if (elapsed < at->due)
		return 0;
	if (elapsed - at->due > BURST * set->interval)
		at->due = elapsed - BURST * set->interval;
	at->due += set->interval;
	return 1;
}

SECTION("xdp")
int flood(struct xdp_md *context)
{
	void *data = (void *)(long)context->data;
	void *end = (void *)(long)context->data_end;
	struct settings *set;
	struct progress *at;
	struct frame *frame;
	u32 zero = 0, next;
	int word;

	set = bpf_map_lookup_elem(&settings, &zero);
	at = bpf_map_lookup_elem(&progress, &zero);
	if (!set || !at || !is_due(set, at))
		return XDP_DROP;
	next = at->frame;
	at->frame = next + 1 < set->frames ? next + 1 : 0;
	frame = bpf_map_lookup_elem(&frames, &next);
	if (!frame)
		return XDP_DROP;
#pragma unroll
	for (word = 0; word < FRAME_WORDS; word++) {
		if (data + 8 * (word + 1) > end)
			break;
		((u64 *)data)[word] = frame->words[word];
	}
	at->sent++;
	return bpf_redirect(set->interface, 0);
}

static const char license_text[] SECTION("license") = "MIT";
