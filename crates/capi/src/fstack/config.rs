//! Configuration file of F-Stack: sections with lines `key=value`, and comments after `#` or `;`.

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};

use tidegate::IpCidr;
use tidegate::host::HostConfig;

use crate::config::{EmbeddedHost, StackLocation, value};

/// Path of the configuration file from the arguments of `ff_init`.
pub(super) fn path_of(arguments: &[&str]) -> PathBuf {
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let given = match *argument {
            "--conf" | "-c" => rest.next().copied(),
            other => other.strip_prefix("--conf="),
        };
        if let Some(path) = given {
            return path.into();
        }
    }
    "config.ini".into()
}

/// Reads a configuration file.
///
/// # Errors
/// The text has the path, and what is wrong.
pub(super) fn read(path: &Path) -> Result<StackLocation, String> {
    let text = std::fs::read_to_string(path);
    let text = text.map_err(|error| format!("{}: {error}", path.display()))?;
    parse(&text).map_err(|error| format!("{}: {error}", path.display()))
}

/// Section of the file that a line belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Section {
    /// Our own: `[tidegate]`.
    Tidegate,
    /// The first interface: `[port0]`.
    Port,
    /// One without a meaning here.
    Other,
}

/// Length of a prefix from a netmask.
fn prefix_bits(mask: Ipv4Addr) -> Result<u8, String> {
    let bits = u32::from(mask);
    match bits.leading_ones() + bits.trailing_zeros() {
        32 => Ok(bits.leading_ones() as u8),
        _ if bits == 0 => Ok(0),
        _ => Err(format!("netmask={mask}: not the mask of a prefix")),
    }
}

fn parse(text: &str) -> Result<StackLocation, String> {
    let mut host = HostConfig::default();
    let mut section = Section::Other;
    let (mut address, mut mask) = (None::<Ipv4Addr>, None::<Ipv4Addr>);
    let (mut address6, mut bits6) = (None::<IpAddr>, 64);
    let mut socket = None;
    for line in text.lines() {
        let line = line.split(['#', ';']).next().unwrap_or_default().trim();
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            section = match name.trim() {
                "tidegate" => Section::Tidegate,
                "port0" => Section::Port,
                _ => Section::Other,
            };
            continue;
        }
        let Some((key, text)) = line.split_once('=') else { continue };
        let (key, text) = (key.trim(), text.trim());
        match (section, key) {
            (Section::Tidegate, "socket") => socket = Some(PathBuf::from(text)),
            (Section::Tidegate, "io") => host.io = value(key, text)?,
            (Section::Tidegate, "iface") => host.iface = Some(text.to_owned()),
            (Section::Tidegate, "shared") => host.shared = value(key, text)?,
            (Section::Tidegate, _) => return Err(format!("[tidegate]: unknown key {key:?}")),
            (Section::Port, "addr") => address = Some(value(key, text)?),
            (Section::Port, "netmask") => mask = Some(value(key, text)?),
            (Section::Port, "gateway") => host.gateways.push(value(key, text)?),
            (Section::Port, "addr6") => address6 = Some(value(key, text)?),
            (Section::Port, "prefix_len") => bits6 = value(key, text)?,
            (Section::Port, "gateway6") => host.gateways.push(value(key, text)?),
            (Section::Port, "if_name") if host.iface.is_none() => {
                host.iface = Some(text.to_owned());
            }
            _ => {}
        }
    }
    if let Some(socket) = socket {
        return Ok(StackLocation::daemon(&socket));
    }
    if host.shared {
        host.gateways.clear();
    } else {
        let mut add = |address: IpAddr, bits: u8| -> Result<(), String> {
            host.addresses.push(IpCidr::new(address, bits).map_err(|error| error.to_string())?);
            Ok(())
        };
        if let Some(address) = address {
            let bits = prefix_bits(mask.unwrap_or(Ipv4Addr::new(255, 255, 255, 0)))?;
            add(address.into(), bits)?;
        }
        if let Some(address) = address6 {
            add(address, bits6)?;
        }
    }
    if host.iface.is_none() {
        return Err("no interface: name one as `iface` in section [tidegate], or as `if_name` in \
                    section [port0]"
            .into());
    }
    Ok(StackLocation::Embedded(Box::new(EmbeddedHost { host, ..Default::default() })))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_of_f_stack_is_read() {
        let text = "[dpdk]\nlcore_mask=1\naddr=ignored\n[port0]\naddr=192.0.2.7\n\
                    netmask=255.255.254.0 # two networks\nbroadcast=192.0.3.255\n\
                    gateway=192.0.2.1\naddr6=2001:db8::7\nprefix_len=56\n[tidegate]\niface=eth0\n";
        let Ok(StackLocation::Embedded(embedded)) = parse(text) else { panic!("embedded") };
        let addresses: Vec<String> =
            embedded.host.addresses.iter().map(ToString::to_string).collect();
        assert_eq!(addresses, ["192.0.2.7/23", "2001:db8::7/56"]);
        assert_eq!(embedded.host.iface.as_deref(), Some("eth0"));
        assert_eq!(embedded.host.gateways, ["192.0.2.1".parse::<IpAddr>().unwrap()]);
        let daemon = parse("[tidegate]\nsocket=/run/x\n");
        assert!(matches!(daemon, Ok(StackLocation::Daemon { .. })));
        for (text, part) in [
            ("[port0]\naddr=192.0.2.7\n", "no interface"),
            ("[port0]\nif_name=e\naddr=192.0.2.7\nnetmask=255.0.255.0", "mask"),
            ("[tidegate]\niface=e\ninterface=f", "interface"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn file_is_named_by_an_argument() {
        for arguments in
            [&["p", "--conf", "x.ini"][..], &["p", "--conf=x.ini"], &["p", "-c", "x.ini"]]
        {
            assert_eq!(path_of(arguments), Path::new("x.ini"));
        }
        assert_eq!(path_of(&["p", "--proc-id=0"]), Path::new("config.ini"));
    }
}
