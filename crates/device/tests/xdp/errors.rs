//! Errors of opening a device.

use super::*;

/// Error of opening a device with this configuration.
fn open_error(namespace: &Namespace, config: XdpConfig) -> XdpError {
    let mut arena = arena(1024);
    let error = try_open(namespace, config, &mut arena).err().expect("an error");
    assert_eq!(arena.available(), arena.capacity(), "{error}");
    error
}

#[test]
fn open_errors_name_the_cause_and_leave_nothing_behind() {
    if !can_create_namespaces() {
        return;
    }
    let pair = VethPair::new(1);
    let left = &pair.left;
    let config = || XdpConfig::new("left");
    let error_text = |config| {
        let error = open_error(left, config);
        wait_until_detached(left, &error.to_string());
        error.to_string()
    };

    let text = error_text(XdpConfig::new("nosuch0"));
    assert!(text.contains("nosuch0") && text.contains("left"), "{text}");
    assert!(error_text(XdpConfig::new("lo")).contains("`lo` is not an Ethernet interface"));
    assert!(error_text(XdpConfig::new("a-name-that-is-too-long")).contains("too-long"));

    let rings = RingSizes::default().receive(1000);
    assert!(error_text(config().rings(rings)).contains("1000 entries"));
    let queues = |queues: &[u32]| config().queues(queues.to_vec());
    assert!(error_text(queues(&[3])).contains("no receive queue 3: it has 1"));
    assert!(error_text(queues(&[])).contains("at least one"));
    assert!(error_text(queues(&[0, 0])).contains("only once"));
    let zero = config().copy(CopyMode::ZeroCopy);
    assert!(matches!(open_error(left, zero), XdpError::Socket { queue: 0, .. }));

    let many =
        (0..2000).map(|n| SteeringRule::Address(IpAddr::from([10, 1, (n >> 8) as u8, n as u8])));
    let many = config().steering(rules(many.collect::<Vec<_>>()));
    assert!(error_text(many).contains("1024 addresses"));

    left.ip("link set left mtu 3000");
    let text = error_text(config());
    assert!(text.contains("3000") && text.contains("ip link set dev left mtu 1774"), "{text}");
    left.ip("link set left mtu 1500 down");
    assert!(error_text(config()).contains("ip link set dev left up"));
    left.ip("link set left up");

    let error = left.run(|| {
        let none = CapabilitySets {
            effective: CapabilitySet::empty(),
            permitted: CapabilitySet::empty(),
            inheritable: CapabilitySet::empty(),
        };
        set_capabilities(None, none).unwrap();
        XdpDevice::open(config(), &mut arena(64)).err().unwrap()
    });
    assert!(matches!(error, XdpError::NotPermitted { .. }), "{error}");
    assert!(error.to_string().contains("CAP_NET_ADMIN"), "{error}");
    wait_until_detached(left, "no permission");
}

#[test]
fn rejects_a_second_device_on_the_interface() {
    if !can_create_namespaces() {
        return;
    }
    let pair = VethPair::new(1);
    let mut arena = arena(1024);
    let mut device = open(&pair.left, rules([udp(ECHO_PORT)]), &mut arena);
    let error = open_error(&pair.left, XdpConfig::new("left"));
    let own = format!("by process {} (", std::process::id());
    assert!(matches!(error, XdpError::AlreadyAttached { .. }), "{error}");
    assert!(error.to_string().contains(&own), "{error}");
    // The first device still works.
    check_echo(&pair, &mut device, &mut arena);
    device.close(&mut arena);
}

#[test]
fn large_peer_mtu_falls_back_to_generic_mode() {
    if !can_create_namespaces() {
        return;
    }
    let pair = VethPair::new(1);
    pair.right.ip("link set right mtu 9000");
    let native = XdpConfig::new("left").mode(AttachMode::Native);
    let text = open_error(&pair.left, native).to_string();
    assert!(text.contains("MTU"), "{text}");
    let mut arena = arena(1024);
    let mut device = open(&pair.left, rules([udp(ECHO_PORT)]), &mut arena);
    assert!(device.capabilities().detail.starts_with("generic, copy"));
    check_echo(&pair, &mut device, &mut arena);
    device.close(&mut arena);
}
