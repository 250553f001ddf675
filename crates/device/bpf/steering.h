/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Steering rules for ports, and the settings of all rules.
 *
 * src/xdp/steering.rs defines the same layouts.
 */
#pragma once

#include "kernel.h"

/* Kinds of rules in use, and modes; bits of settings.flags. */
enum {
	STEER_EVERYTHING = 1 << 0,
	STEER_ADDRESSES = 1 << 1,
	STEER_PORTS_OF_ADDRESS = 1 << 2,
	STEER_PORTS_OF_ANY = 1 << 3,
	STEER_ADMISSION = 1 << 4,
	/* Matching frames without a socket are dropped: a socket will follow. */
	STEER_HOLDING = 1 << 5,
	/* There is an IPv6 address rule: packets to all nodes are answered. */
	STEER_ALL_NODES = 1 << 6,
};

struct settings {
	u32 flags;
	/* VLAN id of the frames that the rules apply to; 0: untagged. */
	u32 vlan;
};

struct port {
	u8 bytes[16]; /* all zero: any address of the family */
	u16 port;     /* network byte order */
	u8 protocol;
	u8 family;
};

struct {
	NUMBER(type, BPF_MAP_TYPE_ARRAY);
	NUMBER(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, struct settings);
} settings SECTION(".maps");

struct {
	NUMBER(type, BPF_MAP_TYPE_HASH);
	NUMBER(max_entries, 16384);
	TYPE(key, struct port);
	TYPE(value, u32);
} ports SECTION(".maps");
