//! LOC records (RFC 1876): latitude, longitude, altitude, and the size and precision of a place.

/// Expected form of the data.
pub(super) const EXPECTED: &str =
    "a location, as 52 22 23.000 N 4 53 32.000 E -2.00m 1m 10000m 10m";

/// Thousandths of an arc second of a degree and of a minute.
const DEGREE: u32 = 3_600_000;
const MINUTE: u32 = 60_000;

/// Value of the equator and of the prime meridian.
const ORIGIN: u32 = 1 << 31;

/// Centimetres from the base of altitudes to the reference spheroid.
const ALTITUDE_BASE: i64 = 10_000_000;

/// Default size and precisions, encoded: 1 m, 10,000 m, 10 m.
const DEFAULTS: [u8; 3] = [0x12, 0x16, 0x13];

/// Encodes the fields of a location. Fails with the index of the token at fault.
pub(super) fn encode(tokens: &[&str]) -> Result<[u8; 16], usize> {
    let mut next = 0;
    let latitude = angle(tokens, &mut next, 90, ["N", "S"])?;
    let longitude = angle(tokens, &mut next, 180, ["E", "W"])?;
    let altitude = tokens.get(next).and_then(|text| centimetres(text)).ok_or(next)?;
    let altitude = u32::try_from(altitude + ALTITUDE_BASE).map_err(|_| next)?;
    next += 1;
    let mut sizes = DEFAULTS;
    for size in &mut sizes {
        let Some(text) = tokens.get(next) else { break };
        *size = centimetres(text).and_then(power_of_ten).ok_or(next)?;
        next += 1;
    }
    if next < tokens.len() {
        return Err(next);
    }
    let mut data = [0; 16];
    data[1..4].copy_from_slice(&sizes);
    data[4..8].copy_from_slice(&latitude.to_be_bytes());
    data[8..12].copy_from_slice(&longitude.to_be_bytes());
    data[12..].copy_from_slice(&altitude.to_be_bytes());
    Ok(data)
}

/// Reads degrees, optional minutes and seconds, and the direction.
fn angle(
    tokens: &[&str],
    next: &mut usize,
    max_degrees: u32,
    directions: [&str; 2],
) -> Result<u32, usize> {
    let mut total = 0;
    // Degrees and minutes are whole, seconds have up to three decimals.
    let units = [(DEGREE, max_degrees + 1, 0), (MINUTE, 60, 0), (1000, 60, 3)];
    for (index, (unit, limit, decimals)) in units.into_iter().enumerate() {
        let text = *tokens.get(*next).ok_or(*next)?;
        if index > 0 && directions.iter().any(|direction| direction.eq_ignore_ascii_case(text)) {
            break;
        }
        let thousandths = decimal(text, 3, decimals).ok_or(*next)?;
        if thousandths >= u64::from(limit) * 1000 {
            return Err(*next);
        }
        total += (thousandths * u64::from(unit) / 1000) as u32;
        *next += 1;
    }
    let text = *tokens.get(*next).ok_or(*next)?;
    let is = |direction: &str| direction.eq_ignore_ascii_case(text);
    let is_over = total > max_degrees * DEGREE;
    let value = match () {
        () if is_over => return Err(*next),
        () if is(directions[0]) => ORIGIN + total,
        () if is(directions[1]) => ORIGIN - total,
        () => return Err(*next),
    };
    *next += 1;
    Ok(value)
}

/// Parses an unsigned decimal number with at most `max_decimals` decimals, as a multiple of
/// 10^-`places`.
fn decimal(text: &str, places: u32, max_decimals: usize) -> Option<u64> {
    let (whole, decimals) = text.split_once('.').unwrap_or((text, ""));
    let is_number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty()
        || !is_number(whole)
        || !is_number(decimals)
        || decimals.len() > max_decimals
    {
        return None;
    }
    let scale = 10_u64.pow(places);
    let fraction: u64 = format!("{decimals:0<width$}", width = places as usize).parse().ok()?;
    whole.parse::<u64>().ok()?.checked_mul(scale)?.checked_add(fraction)
}

/// Parses metres with up to two decimals and an optional `m`.
fn centimetres(text: &str) -> Option<i64> {
    let text = text.strip_suffix(['m', 'M']).unwrap_or(text);
    let (sign, text) = match text.strip_prefix('-') {
        Some(rest) => (-1, rest),
        None => (1, text),
    };
    let value = i64::try_from(decimal(text, 2, 2)?).ok()?;
    Some(sign * value)
}

/// Encodes centimetres as a digit and a power of ten (RFC 1876 section 2).
fn power_of_ten(centimetres: i64) -> Option<u8> {
    let mut mantissa = u64::try_from(centimetres).ok()?;
    let mut exponent = 0;
    while mantissa > 9 {
        mantissa /= 10;
        exponent += 1;
    }
    (exponent <= 9).then_some((mantissa as u8) << 4 | exponent)
}
