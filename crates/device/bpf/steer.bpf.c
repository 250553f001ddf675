/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Steers frames: frames that match a rule are redirected to Tidegate's AF_XDP
 * sockets, all others pass to the kernel unchanged.
 *
 * The maps are filled by src/xdp/program.rs.
 */
#include "admission.h"
#include "steering.h"

/* Decision for a frame; in the order of SteeringCounters. */
enum counter {
	TAKEN,
	PASSED_NOT_STEERED,
	PASSED_OTHER_PROTOCOL,
	PASSED_OTHER_VLAN,
	PASSED_FRAGMENT,
	PASSED_EXTENSION,
	PASSED_MALFORMED,
	PASSED_NO_SOCKET,
	COUNTERS,
};

/* An IPv4 address fills the first four bytes, the rest is zero. */
struct address {
	u8 bytes[16];
	u32 family; /* 4 or 6 */
};

struct {
	NUMBER(type, BPF_MAP_TYPE_HASH);
	NUMBER(max_entries, 1024);
	TYPE(key, struct address);
	TYPE(value, u32);
} addresses SECTION(".maps");

/* Socket of each receive queue. */
struct {
	NUMBER(type, BPF_MAP_TYPE_XSKMAP);
	NUMBER(max_entries, 256);
	TYPE(key, u32);
	TYPE(value, u32);
} sockets SECTION(".maps");

struct {
	NUMBER(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	NUMBER(max_entries, COUNTERS);
	TYPE(key, u32);
	TYPE(value, u64);
} counts SECTION(".maps");

/* ICMPv6 type of a ping. */
#define ECHO_REQUEST_V6 128

/* Packets with more IPv6 extension headers are passed to the kernel. */
#define EXTENSION_LIMIT 6

INLINE void count(u32 counter)
{
	u64 *value = bpf_map_lookup_elem(&counts, &counter);

	if (value)
		*value += 1;
}

INLINE int pass(u32 counter)
{
	count(counter);
	return XDP_PASS;
}

INLINE int take(struct xdp_md *context, const struct settings *rules)
{
	const u64 otherwise = rules->flags & STEER_HOLDING ? XDP_DROP : XDP_PASS;
	int action;

	if (rules->flags & STEER_ADMISSION && !admit(context))
		return XDP_DROP;
	action = bpf_redirect_map(&sockets, context->rx_queue_index, otherwise);
	count(action == XDP_REDIRECT ? TAKEN : PASSED_NO_SOCKET);
	return action;
}

INLINE int is_own(const struct settings *rules, const u8 *bytes, u32 family)
{
	struct address key = { .family = family };

	if (!(rules->flags & STEER_ADDRESSES))
		return 0;
	__builtin_memcpy(key.bytes, bytes, family == 4 ? 4 : 16);
	return bpf_map_lookup_elem(&addresses, &key) != 0;
}

/* Matches UDP and TCP by destination address and port. */
INLINE int steer_port(struct xdp_md *context, const struct settings *rules, struct cursor *cursor,
		      const u8 *destination, u8 family, u8 protocol)
{
	struct port key = { .protocol = protocol, .family = family };
	u16 *header;

	if (protocol != PROTOCOL_UDP && protocol != PROTOCOL_TCP)
		return pass(PASSED_OTHER_PROTOCOL);
	header = step(cursor, 4);
	if (!header)
		return pass(PASSED_MALFORMED);
	key.port = header[1];
	if (rules->flags & STEER_PORTS_OF_ANY) {
		if (bpf_map_lookup_elem(&ports, &key))
			return take(context, rules);
	}
	if (rules->flags & STEER_PORTS_OF_ADDRESS) {
		__builtin_memcpy(key.bytes, destination, family == 4 ? 4 : 16);
		if (bpf_map_lookup_elem(&ports, &key))
			return take(context, rules);
	}
	return pass(PASSED_NOT_STEERED);
}

/* Matches ARP packets whose target or sender address has an address rule. */
INLINE int steer_arp(struct xdp_md *context, const struct settings *rules, struct cursor *cursor)
{
	struct arp *arp = step(cursor, sizeof(*arp));

	if (!arp)
		return pass(PASSED_MALFORMED);
	if (arp->protocol_type != be16(ETHERTYPE_IPV4) || arp->protocol_length != 4 ||
	    arp->hardware_length != 6)
		return pass(PASSED_OTHER_PROTOCOL);
	if (is_own(rules, arp->target_protocol, 4) || is_own(rules, arp->sender_protocol, 4))
		return take(context, rules);
	return pass(PASSED_NOT_STEERED);
}

INLINE int steer_ipv4(struct xdp_md *context, const struct settings *rules, struct cursor *cursor)
{
	struct ipv4 *ip = step(cursor, sizeof(*ip));
	u32 options;

	if (!ip || ip->version_and_length >> 4 != 4 || (ip->version_and_length & 15) < 5)
		return pass(PASSED_MALFORMED);
	if (is_own(rules, ip->destination, 4))
		return take(context, rules);
	/* Only the first fragment has ports, and it is of no use alone. */
	if (ip->fragment & be16(0x3fff))
		return pass(PASSED_FRAGMENT);
	/* The verifier has lost the bounds of the check above: the mask repeats them. */
	options = (((ip->version_and_length & 15) - 5) & 15) * 4;
	if (!step(cursor, options))
		return pass(PASSED_MALFORMED);
	return steer_port(context, rules, cursor, ip->destination, 4, ip->protocol);
}

/*
 * Neighbour discovery is sent to a group: the solicited-node group, or all nodes
 * for an unsolicited advertisement. The target address decides.
 */
INLINE int is_own_neighbour_message(const struct settings *rules, struct cursor *cursor)
{
	struct neighbour_message *message = step(cursor, sizeof(*message));

	if (!message)
		return 0;
	if (message->type != NEIGHBOUR_SOLICITATION && message->type != NEIGHBOUR_ADVERTISEMENT)
		return 0;
	return is_own(rules, message->target, 6);
}

/* The group of all nodes, ff02::1 (RFC 4291 section 2.7.1). */
INLINE int is_all_nodes(const struct settings *rules, const struct ipv6 *ip)
{
	const u8 *bytes = ip->destination;
	int i;

	if (!(rules->flags & STEER_ALL_NODES) || bytes[0] != 0xff || bytes[1] != 2 ||
	    bytes[15] != 1)
		return 0;
#pragma unroll
	for (i = 2; i < 15; i++) {
		if (bytes[i])
			return 0;
	}
	return 1;
}

/*
 * A frame goes to the kernel or to Tidegate, not to both. The kernel needs the
 * router advertisements, MLD queries and datagrams that are sent to all nodes.
 */
INLINE int is_answered_for_all_nodes(u8 protocol, struct cursor cursor)
{
	u8 *type;

	if (protocol == PROTOCOL_UDP || protocol == PROTOCOL_TCP)
		return 0;
	if (protocol != PROTOCOL_ICMPV6)
		return 1;
	type = step(&cursor, 1);
	return type && *type == ECHO_REQUEST_V6;
}

INLINE int steer_ipv6(struct xdp_md *context, const struct settings *rules, struct cursor *cursor)
{
	struct ipv6 *ip = step(cursor, sizeof(*ip));
	int to_all_nodes;
	u8 *extension;
	u8 next;
	int i;

	if (!ip || (*(u8 *)ip >> 4) != 6)
		return pass(PASSED_MALFORMED);
	if (is_own(rules, ip->destination, 6))
		return take(context, rules);
	next = ip->next_header;
	to_all_nodes = is_all_nodes(rules, ip);
	if (next == PROTOCOL_ICMPV6 && ip->destination[0] == 0xff) {
		if (to_all_nodes && is_answered_for_all_nodes(next, *cursor))
			return take(context, rules);
		if (is_own_neighbour_message(rules, cursor))
			return take(context, rules);
		return pass(PASSED_NOT_STEERED);
	}
#pragma unroll
	for (i = 0; i < EXTENSION_LIMIT; i++) {
		if (next == PROTOCOL_FRAGMENT)
			return pass(PASSED_FRAGMENT);
		if (next != PROTOCOL_HOP_BY_HOP && next != PROTOCOL_ROUTING &&
		    next != PROTOCOL_DESTINATION) {
			if (to_all_nodes && is_answered_for_all_nodes(next, *cursor))
				return take(context, rules);
			return steer_port(context, rules, cursor, ip->destination, 6, next);
		}
		extension = step(cursor, 8);
		if (!extension)
			return pass(PASSED_MALFORMED);
		next = extension[0];
		if (!step(cursor, extension[1] * 8))
			return pass(PASSED_MALFORMED);
	}
	return pass(PASSED_EXTENSION);
}

SECTION("xdp")
int steer(struct xdp_md *context)
{
	struct cursor cursor = { (void *)(long)context->data, (void *)(long)context->data_end };
	struct ethernet *ethernet;
	struct settings *rules;
	struct vlan *vlan;
	u32 zero = 0, tag = 0;
	u16 type;

	rules = bpf_map_lookup_elem(&settings, &zero);
	if (!rules)
		return XDP_PASS;
	if (rules->flags & STEER_EVERYTHING)
		return take(context, rules);

	ethernet = step(&cursor, sizeof(*ethernet));
	if (!ethernet)
		return pass(PASSED_MALFORMED);
	type = ethernet->type;
	if (type == be16(ETHERTYPE_VLAN) || type == be16(ETHERTYPE_SERVICE_VLAN)) {
		vlan = step(&cursor, sizeof(*vlan));
		if (!vlan)
			return pass(PASSED_MALFORMED);
		/* VLAN id 0: priority tag only. */
		tag = be16(vlan->tag) & 0xfff;
		type = vlan->type;
	}
	if (tag != rules->vlan)
		return pass(PASSED_OTHER_VLAN);

	switch (be16(type)) {
	case ETHERTYPE_IPV4:
		return steer_ipv4(context, rules, &cursor);
	case ETHERTYPE_IPV6:
		return steer_ipv6(context, rules, &cursor);
	case ETHERTYPE_ARP:
		return steer_arp(context, rules, &cursor);
	default:
		return pass(PASSED_OTHER_PROTOCOL);
	}
}

static const char license_text[] SECTION("license") = "MIT";
