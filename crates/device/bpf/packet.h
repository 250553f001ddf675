/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Packet headers, and a cursor to parse them.
 */
#pragma once

#include "kernel.h"

enum {
	ETHERTYPE_IPV4 = 0x0800,
	ETHERTYPE_ARP = 0x0806,
	ETHERTYPE_VLAN = 0x8100,
	ETHERTYPE_SERVICE_VLAN = 0x88a8,
	ETHERTYPE_IPV6 = 0x86dd,
};

enum {
	PROTOCOL_HOP_BY_HOP = 0,
	PROTOCOL_TCP = 6,
	PROTOCOL_UDP = 17,
	PROTOCOL_ROUTING = 43,
	PROTOCOL_FRAGMENT = 44,
	PROTOCOL_ICMPV6 = 58,
	PROTOCOL_DESTINATION = 60,
};

enum {
	ROUTER_SOLICITATION = 133,
	NEIGHBOUR_SOLICITATION = 135,
	NEIGHBOUR_ADVERTISEMENT = 136,
	REDIRECT = 137,
};

struct ethernet {
	u8 destination[6];
	u8 source[6];
	u16 type;
} __attribute__((packed));

struct vlan {
	u16 tag;
	u16 type;
} __attribute__((packed));

struct arp {
	u16 hardware_type;
	u16 protocol_type;
	u8 hardware_length;
	u8 protocol_length;
	u16 operation;
	u8 sender_hardware[6];
	u8 sender_protocol[4];
	u8 target_hardware[6];
	u8 target_protocol[4];
} __attribute__((packed));

struct ipv4 {
	u8 version_and_length;
	u8 traffic_class;
	u16 total_length;
	u16 identification;
	u16 fragment;
	u8 ttl;
	u8 protocol;
	u16 checksum;
	u8 source[4];
	u8 destination[4];
} __attribute__((packed));

struct ipv6 {
	u32 version;
	u16 payload_length;
	u8 next_header;
	u8 hop_limit;
	u8 source[16];
	u8 destination[16];
} __attribute__((packed));

struct neighbour_message {
	u8 type;
	u8 code;
	u16 checksum;
	u32 flags;
	u8 target[16];
} __attribute__((packed));

/* The part of a frame that was not parsed yet. */
struct cursor {
	void *at;
	void *end;
};

/* Advances by `size` bytes; returns their start, or null if they pass the end. */
INLINE void *step(struct cursor *cursor, u32 size)
{
	void *at = cursor->at;

	if (at + size > cursor->end)
		return 0;
	cursor->at = at + size;
	return at;
}
