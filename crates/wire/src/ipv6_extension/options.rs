//! Options of hop-by-hop and destination options headers (RFC 8200 section 4.2).

use core::iter::FusedIterator;

use super::{ExtensionError, ParameterProblem};
use crate::DropReason;
use crate::icmpv6::parameter_problem;

/// Maximum number of options in one header, not counting padding (RFC 8504 section 5.3).
pub const MAX_OPTIONS: usize = 8;

/// Maximum length in bytes of consecutive padding: enough to align the following data to 8
/// bytes, as RFC 4942 section 2.1.9.5 recommends.
pub const MAX_PADDING_BYTES: usize = 7;

/// Option of a hop-by-hop or destination options header. Padding is never yielded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv6Option<'a> {
    /// Option type. Its two highest bits select the action of a host that does not know the option.
    pub kind: u8,
    /// Option data.
    pub data: &'a [u8],
    /// Offset of the option type from the start of the IPv6 header, in bytes.
    pub offset_bytes: usize,
}

impl Ipv6Option<'_> {
    /// Option type of the router alert (RFC 2711).
    pub const ROUTER_ALERT: u8 = 5;
    /// Option type of the jumbo payload length (RFC 2675).
    pub const JUMBO_PAYLOAD: u8 = 0xc2;

    /// Applies the action that the type of an unknown option selects (RFC 8200 section 4.2).
    pub(super) fn apply_unknown_option_action(&self) -> Result<(), ExtensionError> {
        let reason = match self.kind {
            Self::JUMBO_PAYLOAD => DropReason::Ipv6Jumbogram,
            _ => DropReason::Ipv6OptionUnknown,
        };
        let mut error =
            ExtensionError::with_icmp_error(reason, parameter_problem::OPTION, self.offset_bytes);
        match self.kind >> 6 {
            0b00 => return Ok(()),
            0b01 => error.icmp_error = None,
            0b10 => {
                error.icmp_error = error
                    .icmp_error
                    .map(|problem| ParameterProblem { allowed_for_group: true, ..problem });
            }
            _ => {}
        }
        Err(error)
    }
}

/// Iterator over the options of a header.
///
/// Yields an error and ends when an option runs past the header
/// ([`DropReason::Ipv6ExtensionTruncated`]). The same holds for more than [`MAX_OPTIONS`]
/// options or more than [`MAX_PADDING_BYTES`] of consecutive padding
/// ([`DropReason::Ipv6ExtensionLimit`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv6Options<'a> {
    bytes: &'a [u8],
    offset_bytes: usize,
    option_count: usize,
}

impl<'a> Ipv6Options<'a> {
    const PAD_1: u8 = 0;
    const PAD_N: u8 = 1;

    /// Creates an iterator over the options in `bytes`, which begin `offset_bytes` after the start
    /// of the IPv6 header.
    pub fn new(bytes: &'a [u8], offset_bytes: usize) -> Self {
        Self { bytes, offset_bytes, option_count: 0 }
    }

    /// Skips the padding before the next option.
    fn skip_padding(&mut self) -> Result<(), DropReason> {
        let mut padding_bytes = 0;
        loop {
            let bytes = match *self.bytes {
                [Self::PAD_1, ..] => 1,
                [Self::PAD_N, length, ..] => 2 + usize::from(length),
                [Self::PAD_N] => return Err(DropReason::Ipv6ExtensionTruncated),
                _ => return Ok(()),
            };
            padding_bytes += bytes;
            if padding_bytes > MAX_PADDING_BYTES {
                return Err(DropReason::Ipv6ExtensionLimit);
            }
            self.bytes = self.bytes.get(bytes..).ok_or(DropReason::Ipv6ExtensionTruncated)?;
            self.offset_bytes += bytes;
        }
    }

    fn parse_next(&mut self) -> Result<Option<Ipv6Option<'a>>, DropReason> {
        self.skip_padding()?;
        let [kind, rest @ ..] = self.bytes else { return Ok(None) };
        self.option_count += 1;
        if self.option_count > MAX_OPTIONS {
            return Err(DropReason::Ipv6ExtensionLimit);
        }
        let (data, rest) = rest
            .split_first()
            .and_then(|(&length, rest)| rest.split_at_checked(length.into()))
            .ok_or(DropReason::Ipv6ExtensionTruncated)?;
        let option = Ipv6Option { kind: *kind, data, offset_bytes: self.offset_bytes };
        self.bytes = rest;
        self.offset_bytes += 2 + data.len();
        Ok(Some(option))
    }
}

impl<'a> Iterator for Ipv6Options<'a> {
    type Item = Result<Ipv6Option<'a>, DropReason>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = self.parse_next();
        if next.is_err() {
            self.bytes = &[];
        }
        next.transpose()
    }
}

impl FusedIterator for Ipv6Options<'_> {}
