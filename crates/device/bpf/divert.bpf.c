/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Diverts packets from the kernel's own stack to a packet socket, by their ports.
 *
 * The packet socket sees a frame first and keeps it if a rule matches. Behind the
 * socket the same rule drops the frame, so that the kernel does not answer it.
 * The maps are filled by src/packet/divert.rs.
 */
#include "packet.h"
#include "steering.h"

/* Packets with more IPv6 extension headers stay with the kernel. */
#define EXTENSION_LIMIT 6

INLINE int load(struct __sk_buff *frame, u32 offset, void *to, u32 size)
{
	return bpf_skb_load_bytes(frame, offset, to, size) == 0;
}

/* Matches UDP and TCP by destination address and port. */
INLINE int has_rule(struct __sk_buff *frame, const struct settings *rules, u32 offset,
		    const u8 *destination, u8 family, u8 protocol)
{
	struct port key = { .protocol = protocol, .family = family };
	u16 ports_of_packet[2];

	if (protocol != PROTOCOL_UDP && protocol != PROTOCOL_TCP)
		return 0;
	if (!load(frame, offset, ports_of_packet, sizeof(ports_of_packet)))
		return 0;
	key.port = ports_of_packet[1];
	if (rules->flags & STEER_PORTS_OF_ANY && bpf_map_lookup_elem(&ports, &key))
		return 1;
	if (!(rules->flags & STEER_PORTS_OF_ADDRESS))
		return 0;
	__builtin_memcpy(key.bytes, destination, family == 4 ? 4 : 16);
	return bpf_map_lookup_elem(&ports, &key) != 0;
}

INLINE int has_rule_ipv4(struct __sk_buff *frame, const struct settings *rules, u32 offset)
{
	struct ipv4 ip;

	if (!load(frame, offset, &ip, sizeof(ip)))
		return 0;
	if (ip.version_and_length >> 4 != 4 || (ip.version_and_length & 15) < 5)
		return 0;
	/* Only the first fragment has ports, and it is of no use alone. */
	if (ip.fragment & be16(0x3fff))
		return 0;
	offset += (ip.version_and_length & 15) * 4;
	return has_rule(frame, rules, offset, ip.destination, 4, ip.protocol);
}

INLINE int has_rule_ipv6(struct __sk_buff *frame, const struct settings *rules, u32 offset)
{
	struct ipv6 ip;
	u8 extension[2];
	u8 next;
	int i;

	if (!load(frame, offset, &ip, sizeof(ip)) || *(u8 *)&ip >> 4 != 6)
		return 0;
	next = ip.next_header;
	offset += sizeof(ip);
#pragma unroll
	for (i = 0; i < EXTENSION_LIMIT; i++) {
		if (next != PROTOCOL_HOP_BY_HOP && next != PROTOCOL_ROUTING &&
		    next != PROTOCOL_DESTINATION)
			return has_rule(frame, rules, offset, ip.destination, 6, next);
		if (!load(frame, offset, extension, sizeof(extension)))
			return 0;
		next = extension[0];
		offset += 8 + extension[1] * 8;
	}
	return 0;
}

INLINE int is_diverted(struct __sk_buff *frame)
{
	struct ethernet ethernet;
	struct settings *rules;
	u32 zero = 0;

	rules = bpf_map_lookup_elem(&settings, &zero);
	/* The kernel has taken the tag out of the frame. VLAN id 0: priority tag only. */
	if (!rules || (frame->vlan_present ? frame->vlan_tci & 0xfff : 0) != rules->vlan)
		return 0;
	if (!load(frame, 0, &ethernet, sizeof(ethernet)))
		return 0;
	switch (be16(ethernet.type)) {
	case ETHERTYPE_IPV4:
		return has_rule_ipv4(frame, rules, sizeof(ethernet));
	case ETHERTYPE_IPV6:
		return has_rule_ipv6(frame, rules, sizeof(ethernet));
	default:
		return 0;
	}
}

/* Filter of the packet socket; returns the number of bytes to keep. */
SECTION("socket")
int keep(struct __sk_buff *frame)
{
	return is_diverted(frame) ? -1 : 0;
}

/* On receive behind the packet sockets (tcx). */
SECTION("classifier")
int divert(struct __sk_buff *frame)
{
	return is_diverted(frame) ? TCX_DROP : TCX_NEXT;
}

static const char license_text[] SECTION("license") = "MIT";
