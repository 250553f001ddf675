/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Admission: drops packets that would be refused anyway, as early as possible.
 *
 * Rules, limits and arithmetic equal those of the crate tidegate-gate, module
 * `admission`; a test runs both on the same frames. The maps are filled by
 * src/xdp/admission.rs, which defines the same layouts.
 *
 * Several processors share the buckets without a lock. When two of them admit a
 * packet at the same instant, one packet may stay uncounted: slightly more than
 * the rate passes. The rate is adjusted every few milliseconds by the packets
 * actually processed.
 */
#pragma once

#include "packet.h"

#define CLASSES 16
#define RULES 32
#define SOURCE_CELLS 8192
#define KNOWN_WORDS 16384
#define KNOWN_PLACES 4
#define PAYLOAD_WINDOW 48
#define PAYLOAD_WORDS (PAYLOAD_WINDOW / 8)

/* More IPv6 extension headers than any valid sender uses count as malformed. */
#define EXTENSIONS_MAX 6

/* Packet kind: the protocol above IP (1 for both ICMPs), or one of these. */
enum {
	KIND_ICMP = 1,
	KIND_NEIGHBOUR = 256,
	KIND_OTHER = 257,
	KIND_MALFORMED = 258,
	KIND_ANY = 0xffff,
};

/* Port of packets without ports: outside of every port range. */
#define NO_PORT (1 << 16)

struct rule {
	u64 source_high;
	u64 source_low;
	u64 mask_high;
	u64 mask_low;
	u32 port_low;
	u32 port_high;
	u32 size_low;
	u32 size_high;
	u16 kind;
	u8 class;
	u8 family; /* 4 or 6; 0: any source */
	u32 known; /* 1: known sources, 2: unknown sources; 0: any */
	u64 payload[PAYLOAD_WORDS];
	u64 payload_mask[PAYLOAD_WORDS];
	u64 payload_end; /* bytes that the payload has at least; 0: any payload */
};

/* What some of the rules ask. */
enum { ASKS_KNOWN = 1, ASKS_PAYLOAD = 2 };

struct rules {
	u64 key_start;
	u64 key_factor;
	u64 known_mask;
	u32 count;
	u32 asks;
	u64 rest_class; /* class of malformed packets and of packets without a rule */
	struct rule rules[RULES];
};

/* A class that is SHARED or CLOSED may use what the others leave of the total. */
enum { OPEN, LIMITED, CLOSED, SHARED };

struct pace {
	u64 interval_ns;
	u64 burst_ns;
	u64 mode;
};

struct limit {
	struct pace class;
	struct pace source;
};

struct limits {
	struct pace total; /* OPEN: no class exceeds its own rate */
	struct limit classes[CLASSES];
};

/* Decision for a packet; in the order of ClassCounts. */
enum verdict {
	ADMITTED,
	REFUSED_CLOSED,
	REFUSED_RATE,
	REFUSED_SOURCE_SHARE,
	ADMITTED_OVER_SHARE,
	VERDICTS,
};

struct counts {
	u64 packets[CLASSES][VERDICTS];
};

/* Times at which the next packet of each class, and of all of them, is due. */
struct buckets {
	u64 due_ns[CLASSES];
	u64 total_due_ns;
};

/* Due times of sources: two rows of a sketch. */
struct sources {
	u64 due_ns[2 * SOURCE_CELLS];
};

struct known {
	u64 words[KNOWN_WORDS];
};

struct {
	NUMBER(type, BPF_MAP_TYPE_ARRAY);
	NUMBER(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct rules);
} class_rules SECTION(".maps");

struct {
	NUMBER(type, BPF_MAP_TYPE_ARRAY);
	NUMBER(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct limits);
} class_limits SECTION(".maps");

struct {
	NUMBER(type, BPF_MAP_TYPE_ARRAY);
	NUMBER(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct buckets);
} class_buckets SECTION(".maps");

struct {
	NUMBER(type, BPF_MAP_TYPE_ARRAY);
	NUMBER(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct sources);
} source_buckets SECTION(".maps");

struct {
	NUMBER(type, BPF_MAP_TYPE_ARRAY);
	NUMBER(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct known);
} known_sources SECTION(".maps");

struct {
	NUMBER(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	NUMBER(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct counts);
} class_counts SECTION(".maps");

struct facts {
	u64 source_high;
	u64 source_low;
	u64 source_id; /* IPv4 address, or network of an IPv6 address; 0: unknown */
	u32 family;
	u32 port;
	u32 bytes;
	u32 kind;
	u32 network_at; /* offsets in the frame: of the packet, and of its payload */
	u32 payload_at;
	u32 payload_bytes;
	u64 payload[PAYLOAD_WORDS];
};

/*
 * Set when the program is loaded: 1 if the kernel has the helper that reads
 * payloads. Otherwise the verifier does not look at the call.
 */
const volatile u32 reads_payloads SECTION(".rodata") = 0;

INLINE void read_ipv4_source(struct facts *facts, const u8 *bytes)
{
	facts->source_low = be32(bytes);
	facts->source_id = 1ULL << 32 | facts->source_low;
	facts->family = 4;
}

INLINE int read_arp(struct facts *facts, struct cursor *cursor)
{
	struct arp *arp = step(cursor, sizeof(*arp));

	if (!arp)
		return 0;
	if (arp->protocol_type != be16(ETHERTYPE_IPV4) || arp->hardware_length != 6 ||
	    arp->protocol_length != 4) {
		facts->kind = KIND_OTHER;
		return 1;
	}
	facts->kind = KIND_NEIGHBOUR;
	read_ipv4_source(facts, arp->sender_protocol);
	return 1;
}

/*
 * Reads the header of UDP or TCP at `offset` in its packet, of which `left`
 * bytes are left from there. An invalid header has no payload.
 */
INLINE int read_ports(struct facts *facts, struct cursor *cursor, u32 offset, u32 left)
{
	u32 header_bytes = 8, least = 8;
	u16 *ports = step(cursor, 4);
	u8 *rest;

	if (!ports)
		return 0;
	facts->port = be16(ports[1]);
	if (facts->kind == PROTOCOL_TCP) {
		least = 20;
		rest = step(cursor, 9);
		header_bytes = rest ? (rest[8] >> 4) * 4 : 0;
	}
	if (header_bytes < least || header_bytes >= left)
		return 1;
	facts->payload_at = facts->network_at + offset + header_bytes;
	facts->payload_bytes = left - header_bytes;
	return 1;
}

INLINE int read_ipv4(struct facts *facts, struct cursor *cursor)
{
	u64 left = cursor->end - cursor->at;
	struct ipv4 *ip = step(cursor, sizeof(*ip));
	u32 header_bytes, total;

	if (!ip)
		return 0;
	header_bytes = (ip->version_and_length & 15) * 4;
	total = be16(ip->total_length);
	if (ip->version_and_length >> 4 != 4 || header_bytes < 20 || total < header_bytes ||
	    total > left)
		return 0;
	facts->bytes = total;
	facts->kind = ip->protocol;
	read_ipv4_source(facts, ip->source);
	if (ip->fragment & be16(0x3fff))
		return 1;
	if (ip->protocol != PROTOCOL_UDP && ip->protocol != PROTOCOL_TCP)
		return 1;
	if (header_bytes + 4 > total)
		return 0;
	if (!step(cursor, (((ip->version_and_length & 15) - 5) & 15) * 4))
		return 0;
	return read_ports(facts, cursor, header_bytes, total - header_bytes);
}

INLINE int read_ipv6(struct facts *facts, struct cursor *cursor)
{
	u64 left = cursor->end - cursor->at;
	struct ipv6 *ip = step(cursor, sizeof(*ip));
	u32 total, offset = sizeof(*ip), bytes, next;
	u8 *header;
	int i;

	if (!ip)
		return 0;
	total = sizeof(*ip) + be16(ip->payload_length);
	if ((*(u8 *)ip >> 4) != 6 || total > left)
		return 0;
	facts->bytes = total;
	facts->source_high = be64(ip->source);
	facts->source_low = be64(ip->source + 8);
	facts->source_id = facts->source_high;
	facts->family = 6;
	next = ip->next_header;
#pragma unroll
	for (i = 0; i < EXTENSIONS_MAX; i++) {
		facts->kind = next;
		switch (next) {
		case PROTOCOL_HOP_BY_HOP:
		case PROTOCOL_ROUTING:
		case PROTOCOL_DESTINATION:
			header = step(cursor, 8);
			if (!header)
				return 0;
			bytes = header[1] * 8;
			offset += 8 + bytes;
			next = header[0];
			if (offset > total || !step(cursor, bytes))
				return 0;
			break;
		case PROTOCOL_FRAGMENT:
			header = step(cursor, 8);
			if (!header || offset + 8 > total)
				return 0;
			facts->kind = header[0] == PROTOCOL_ICMPV6 ? KIND_ICMP : header[0];
			return 1;
		case PROTOCOL_UDP:
		case PROTOCOL_TCP:
			if (offset + 4 > total)
				return 0;
			return read_ports(facts, cursor, offset, total - offset);
		case PROTOCOL_ICMPV6:
			facts->kind = KIND_ICMP;
			if (ip->hop_limit != 255)
				return 1;
			header = step(cursor, 1);
			if (!header || offset + 1 > total)
				return 0;
			if (header[0] >= ROUTER_SOLICITATION && header[0] <= REDIRECT)
				facts->kind = KIND_NEIGHBOUR;
			return 1;
		default:
			return 1;
		}
	}
	return 0;
}

/* Parses a frame; returns 0 if it is malformed. */
INLINE int read_frame(struct facts *facts, struct cursor *cursor)
{
	struct ethernet *ethernet;
	struct vlan *vlan;
	u16 type;

	facts->bytes = cursor->end - cursor->at;
	ethernet = step(cursor, sizeof(*ethernet));
	if (!ethernet)
		return 0;
	type = ethernet->type;
	facts->network_at = sizeof(*ethernet);
	if (type == be16(ETHERTYPE_VLAN) || type == be16(ETHERTYPE_SERVICE_VLAN)) {
		vlan = step(cursor, sizeof(*vlan));
		if (!vlan)
			return 0;
		type = vlan->type;
		facts->network_at += sizeof(*vlan);
	}
	switch (be16(type)) {
	case ETHERTYPE_IPV4:
		return read_ipv4(facts, cursor);
	case ETHERTYPE_IPV6:
		return read_ipv6(facts, cursor);
	case ETHERTYPE_ARP:
		return read_arp(facts, cursor);
	default:
		facts->kind = KIND_OTHER;
		return 1;
	}
}

/* Finalizer of SplitMix64. */
INLINE u64 mix(u64 word)
{
	word ^= word >> 30;
	word *= 0xbf58476d1ce4e5b9ULL;
	word ^= word >> 27;
	word *= 0x94d049bb133111ebULL;
	return word ^ word >> 31;
}

INLINE int is_known(const struct rules *rules, u64 hash)
{
	u64 low = hash & 0xffffffff, high = hash >> 32 | 1, bit;
	struct known *known;
	u32 zero = 0;
	int i;

	known = bpf_map_lookup_elem(&known_sources, &zero);
	if (!known)
		return 0;
#pragma unroll
	for (i = 0; i < KNOWN_PLACES; i++) {
		bit = (low + i * high) & rules->known_mask;
		if (!(known->words[bit / 64 & (KNOWN_WORDS - 1)] >> (bit & 63) & 1))
			return 0;
	}
	return 1;
}

/* Reads the start of the payload; a payload that cannot be read counts as empty. */
INLINE void read_payload(struct xdp_md *context, struct facts *facts)
{
	u32 bytes = facts->payload_bytes;

	if (bytes > PAYLOAD_WINDOW)
		bytes = PAYLOAD_WINDOW;
	if (!bytes || bpf_xdp_load_bytes(context, facts->payload_at, facts->payload, bytes))
		facts->payload_bytes = 0;
}

INLINE int has_payload(const struct rule *rule, const struct facts *facts)
{
	u64 differing = 0;
	int i;

	if (!rule->payload_end)
		return 1;
	if (facts->payload_bytes < rule->payload_end)
		return 0;
#pragma unroll
	for (i = 0; i < PAYLOAD_WORDS; i++)
		differing |= (facts->payload[i] ^ rule->payload[i]) & rule->payload_mask[i];
	return !differing;
}

INLINE int matches(const struct rule *rule, const struct facts *facts, u32 known)
{
	if (rule->kind != KIND_ANY && rule->kind != facts->kind)
		return 0;
	if (facts->port < rule->port_low || facts->port > rule->port_high)
		return 0;
	if (facts->bytes < rule->size_low || facts->bytes > rule->size_high)
		return 0;
	if (rule->known && rule->known != known)
		return 0;
	if (!has_payload(rule, facts))
		return 0;
	if (!rule->family)
		return 1;
	return rule->family == facts->family &&
	       !((rule->source_high ^ facts->source_high) & rule->mask_high) &&
	       !((rule->source_low ^ facts->source_low) & rule->mask_low);
}

INLINE u32 classify(const struct rules *rules, const struct facts *facts, u64 hash)
{
	u32 i, known = 0;

	if (facts->kind == KIND_MALFORMED)
		return rules->rest_class;
	if (rules->asks & ASKS_KNOWN)
		known = is_known(rules, hash) ? 1 : 2;
	for (i = 0; i < RULES; i++) {
		if (i >= rules->count)
			break;
		if (matches(&rules->rules[i], facts, known))
			return rules->rules[i].class;
	}
	return rules->rest_class;
}

/*
 * Time at which the next packet is due. A time beyond the burst means that the
 * rate was raised since: the bucket is full.
 */
INLINE u64 due(u64 due_ns, u64 now_ns, const struct pace *pace)
{
	u64 full_ns = now_ns + pace->burst_ns;

	return due_ns > full_ns + pace->interval_ns ? full_ns : due_ns;
}

INLINE int has_room(u64 due_ns, u64 now_ns, const struct pace *pace)
{
	return due(due_ns, now_ns, pace) <= now_ns + pace->burst_ns;
}

INLINE int is_half_free(u64 due_ns, u64 now_ns, const struct pace *pace)
{
	return due(due_ns, now_ns, pace) <= now_ns + pace->burst_ns / 2;
}

/* Counts a packet. A packet above the rate leaves the bucket full. */
INLINE u64 charged(u64 due_ns, u64 now_ns, const struct pace *pace)
{
	u64 next = due(due_ns, now_ns, pace);

	if (next < now_ns)
		next = now_ns;
	if (next > now_ns + pace->burst_ns)
		next = now_ns + pace->burst_ns;
	return next + pace->interval_ns;
}

/* The two cells of a source, and the earlier of their times. */
struct source_cells {
	u64 *one;
	u64 *other;
	u64 due_ns;
};

INLINE int find_source(struct source_cells *cells, const struct pace *pace, u64 hash, u32 class,
		       u64 now_ns)
{
	struct sources *sources;
	u64 one, other;
	u32 zero = 0;

	sources = bpf_map_lookup_elem(&source_buckets, &zero);
	if (!sources)
		return 0;
	hash = mix(hash ^ (class + 1));
	cells->one = &sources->due_ns[hash & (SOURCE_CELLS - 1)];
	cells->other = &sources->due_ns[SOURCE_CELLS + (hash >> 32 & (SOURCE_CELLS - 1))];
	one = due(*cells->one, now_ns, pace);
	other = due(*cells->other, now_ns, pace);
	cells->due_ns = one < other ? one : other;
	return 1;
}

INLINE void charge_source(const struct source_cells *cells, const struct pace *pace, u64 now_ns)
{
	u64 next = charged(cells->due_ns, now_ns, pace);
	u64 one = due(*cells->one, now_ns, pace);
	u64 other = due(*cells->other, now_ns, pace);

	*cells->one = one > next ? one : next;
	*cells->other = other > next ? other : next;
}

/*
 * A share is a bound only while others want the rest: within its share a source
 * may use the whole burst of its class, above it only half; the same for classes
 * and the total. A refused packet is charged to nobody.
 */
INLINE enum verdict judge(const struct limits *limits, u64 hash, u32 class)
{
	const struct limit *limit = &limits->classes[class];
	struct source_cells cells = {};
	int has_share, in_share = 1, fits = 0, shares_total;
	struct buckets *buckets;
	u64 now_ns, *bucket;
	u32 zero = 0;

	if (limit->class.mode == OPEN)
		return ADMITTED;
	buckets = bpf_map_lookup_elem(&class_buckets, &zero);
	if (!buckets)
		return ADMITTED;
	bucket = &buckets->due_ns[class];
	now_ns = bpf_ktime_get_ns();
	has_share = limit->source.mode != OPEN &&
		    find_source(&cells, &limit->source, hash, class, now_ns);
	if (has_share)
		in_share = has_room(cells.due_ns, now_ns, &limit->source);
	if (limit->class.mode != CLOSED)
		fits = in_share ? has_room(*bucket, now_ns, &limit->class)
				: is_half_free(*bucket, now_ns, &limit->class);
	shares_total = limit->class.mode != LIMITED && limits->total.mode != OPEN;
	if (!fits &&
	    !(shares_total && is_half_free(buckets->total_due_ns, now_ns, &limits->total))) {
		if (!in_share)
			return REFUSED_SOURCE_SHARE;
		return limit->class.mode == CLOSED ? REFUSED_CLOSED : REFUSED_RATE;
	}
	if (shares_total)
		buckets->total_due_ns = charged(buckets->total_due_ns, now_ns, &limits->total);
	if (limit->class.mode != CLOSED)
		*bucket = charged(*bucket, now_ns, &limit->class);
	if (has_share && in_share)
		charge_source(&cells, &limit->source, now_ns);
	return in_share ? ADMITTED : ADMITTED_OVER_SHARE;
}

/*
 * Decides on a frame and counts it; returns 1 if it is admitted. A global function:
 * the verifier reads it once, not for each state in which it is called.
 */
__attribute__((noinline)) int admit(struct xdp_md *context)
{
	struct cursor cursor = { (void *)(long)context->data, (void *)(long)context->data_end };
	struct facts facts = { .port = NO_PORT };
	enum verdict verdict;
	struct counts *counts;
	struct limits *limits;
	struct rules *rules;
	u32 zero = 0, class;
	u64 hash;

	rules = bpf_map_lookup_elem(&class_rules, &zero);
	limits = bpf_map_lookup_elem(&class_limits, &zero);
	counts = bpf_map_lookup_elem(&class_counts, &zero);
	if (!rules || !limits || !counts)
		return 1;
	if (!read_frame(&facts, &cursor))
		facts.kind = KIND_MALFORMED, facts.source_id = 0;
	else if (reads_payloads && rules->asks & ASKS_PAYLOAD)
		read_payload(context, &facts);
	hash = mix((facts.source_id ^ rules->key_start) * rules->key_factor);
	class = classify(rules, &facts, hash) & (CLASSES - 1);
	verdict = judge(limits, hash, class);
	counts->packets[class][verdict] += 1;
	return verdict == ADMITTED || verdict == ADMITTED_OVER_SHARE;
}
