/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Admission control before the kernel's own stack: drops packets that are not
 * admitted and passes all others unchanged.
 *
 * While every packet is admitted, it records the sources, from which user space
 * learns the known sources. The maps are filled by src/xdp/guard.rs.
 */
#include "admission.h"

/* Slots of recently seen sources, by hash; a later source overwrites its slot. */
#define SEEN 4096

struct guard {
	u64 limiting;
};

struct seen {
	u64 source_ids[SEEN];
};

struct {
	NUMBER(type, BPF_MAP_TYPE_ARRAY);
	NUMBER(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct guard);
} guard SECTION(".maps");

struct {
	NUMBER(type, BPF_MAP_TYPE_ARRAY);
	NUMBER(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct seen);
} seen_sources SECTION(".maps");

INLINE void note(struct xdp_md *context)
{
	struct cursor cursor = { (void *)(long)context->data, (void *)(long)context->data_end };
	struct facts facts = { .port = NO_PORT };
	struct seen *seen;
	u32 zero = 0;

	seen = bpf_map_lookup_elem(&seen_sources, &zero);
	if (seen && read_frame(&facts, &cursor))
		seen->source_ids[mix(facts.source_id) & (SEEN - 1)] = facts.source_id;
}

SECTION("xdp")
int guard_kernel(struct xdp_md *context)
{
	struct guard *state;
	u32 zero = 0;

	state = bpf_map_lookup_elem(&guard, &zero);
	if (!state)
		return XDP_PASS;
	if (state->limiting)
		return admit(context) ? XDP_PASS : XDP_DROP;
	note(context);
	return XDP_PASS;
}

static const char license_text[] SECTION("license") = "MIT";
