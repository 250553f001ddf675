//! Packet filter in classic BPF, as libpcap compiles filter expressions.
//!
//! The program comes from another process: [`CaptureFilter::new`] checks all of it. Jumps only lead
//! forward, so that a program of `n` instructions ends after at most `n` steps.

/// Maximum number of instructions of a filter.
pub const MAX_FILTER_INSTRUCTIONS: usize = 1024;

/// Scratch words of a filter program.
const SCRATCH_WORDS: usize = 16;

/// Instruction of classic BPF, as in `struct sock_filter`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilterInstruction {
    /// Operation code.
    pub code: u16,
    /// Instructions to skip if a condition is true.
    pub jt: u8,
    /// Instructions to skip if a condition is false.
    pub jf: u8,
    /// Operand.
    pub k: u32,
}

/// Error of a filter program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FilterError {
    /// The program is empty or too long.
    #[error("a filter has 1 to {MAX_FILTER_INSTRUCTIONS} instructions, not {0}: simplify it")]
    Length(usize),
    /// An instruction is unknown or has an invalid operand.
    #[error("instruction {0} of the filter is invalid")]
    Instruction(usize),
    /// A jump leads out of the program.
    #[error("instruction {0} of the filter jumps out of the program")]
    Jump(usize),
    /// The program does not end with a return.
    #[error("the filter does not end with a return")]
    NoReturn,
}

/// Checked filter program.
#[derive(Clone, Debug)]
pub struct CaptureFilter(Vec<FilterInstruction>);

// Fields of an operation code, as in `linux/bpf_common.h`.
const CLASS: u16 = 0x07;
const LD: u16 = 0x00;
const LDX: u16 = 0x01;
const ST: u16 = 0x02;
const STX: u16 = 0x03;
const ALU: u16 = 0x04;
const JMP: u16 = 0x05;
const RET: u16 = 0x06;
const MISC: u16 = 0x07;

const SIZE: u16 = 0x18;
const WORD: u16 = 0x00;
const HALF: u16 = 0x08;
const BYTE: u16 = 0x10;

const MODE: u16 = 0xe0;
const IMM: u16 = 0x00;
const ABS: u16 = 0x20;
const IND: u16 = 0x40;
const MEM: u16 = 0x60;
const LEN: u16 = 0x80;
const MSH: u16 = 0xa0;

const OPERATION: u16 = 0xf0;
/// The operand is register X, not the constant.
const FROM_X: u16 = 0x08;
/// The return value is register A.
const RET_A: u16 = 0x10;
const TXA: u16 = 0x80;

const ADD: u16 = 0x00;
const SUB: u16 = 0x10;
const MUL: u16 = 0x20;
const DIV: u16 = 0x30;
const OR: u16 = 0x40;
const AND: u16 = 0x50;
const LSH: u16 = 0x60;
const RSH: u16 = 0x70;
const NEG: u16 = 0x80;
const MOD: u16 = 0x90;
const XOR: u16 = 0xa0;

const JA: u16 = 0x00;
const JEQ: u16 = 0x10;
const JGT: u16 = 0x20;
const JGE: u16 = 0x30;
const JSET: u16 = 0x40;

impl FilterInstruction {
    /// True if the operation exists and its operand is in range.
    fn is_valid(self) -> bool {
        let Self { code, k, .. } = self;
        let in_scratch = (k as usize) < SCRATCH_WORDS;
        let (size, mode) = (code & SIZE, code & MODE);
        if code > 0xff {
            return false;
        }
        match code & CLASS {
            LD => match mode {
                IMM | LEN => size == WORD,
                ABS | IND => size <= BYTE,
                MEM => size == WORD && in_scratch,
                _ => false,
            },
            LDX => match mode {
                IMM | LEN => size == WORD,
                MEM => size == WORD && in_scratch,
                MSH => size == BYTE,
                _ => false,
            },
            ST | STX => code <= STX && in_scratch,
            ALU => {
                let constant = code & FROM_X == 0;
                match code & OPERATION {
                    DIV | MOD => !constant || k != 0,
                    LSH | RSH => !constant || k < 32,
                    ADD | SUB | MUL | OR | AND | NEG | XOR => true,
                    _ => false,
                }
            }
            JMP => matches!(code & OPERATION, JA | JEQ | JGT | JGE | JSET),
            RET => code & !(CLASS | RET_A) == 0,
            _ => matches!(code & !CLASS, 0 | TXA),
        }
    }
}

impl CaptureFilter {
    /// Checks a program.
    ///
    /// # Errors
    /// See [`FilterError`].
    pub fn new(program: Vec<FilterInstruction>) -> Result<Self, FilterError> {
        if program.is_empty() || program.len() > MAX_FILTER_INSTRUCTIONS {
            return Err(FilterError::Length(program.len()));
        }
        for (at, instruction) in program.iter().enumerate() {
            if !instruction.is_valid() {
                return Err(FilterError::Instruction(at));
            }
            if instruction.code & CLASS == JMP {
                let farthest = match instruction.code & OPERATION {
                    JA => instruction.k as usize,
                    _ => usize::from(instruction.jt.max(instruction.jf)),
                };
                if at + 1 + farthest >= program.len() {
                    return Err(FilterError::Jump(at));
                }
            }
        }
        match program.last() {
            Some(last) if last.code & CLASS == RET => Ok(Self(program)),
            _ => Err(FilterError::NoReturn),
        }
    }

    /// True if the filter selects this frame, of which `data` are the first bytes.
    pub fn matches(&self, data: &[u8], frame_bytes: usize) -> bool {
        // A load from outside the frame selects nothing.
        self.run(data, frame_bytes as u32).is_some_and(|kept| kept > 0)
    }

    fn run(&self, data: &[u8], frame_bytes: u32) -> Option<u32> {
        let (mut a, mut x) = (0_u32, 0_u32);
        let mut scratch = [0_u32; SCRATCH_WORDS];
        let mut next = 0;
        while let Some(&FilterInstruction { code, jt, jf, k }) = self.0.get(next) {
            next += 1;
            let operand = if code & FROM_X == 0 { k } else { x };
            match code & CLASS {
                LD => {
                    a = match code & MODE {
                        IMM => k,
                        LEN => frame_bytes,
                        MEM => *scratch.get(k as usize)?,
                        ABS => load(data, code & SIZE, k)?,
                        _ => load(data, code & SIZE, x.checked_add(k)?)?,
                    }
                }
                LDX => {
                    x = match code & MODE {
                        IMM => k,
                        LEN => frame_bytes,
                        MEM => *scratch.get(k as usize)?,
                        // Length of an IPv4 header.
                        _ => (load(data, BYTE, k)? & 0xf) * 4,
                    }
                }
                ST => *scratch.get_mut(k as usize)? = a,
                STX => *scratch.get_mut(k as usize)? = x,
                ALU => a = calculate(code & OPERATION, a, operand)?,
                JMP => {
                    let condition = match code & OPERATION {
                        JA => {
                            next += k as usize;
                            continue;
                        }
                        JEQ => a == operand,
                        JGT => a > operand,
                        JGE => a >= operand,
                        _ => a & operand != 0,
                    };
                    next += usize::from(if condition { jt } else { jf });
                }
                RET => return Some(if code & RET_A == 0 { k } else { a }),
                MISC if code & TXA != 0 => a = x,
                _ => x = a,
            }
        }
        None
    }
}

/// Loads a number in network byte order; `None` outside the frame.
fn load(data: &[u8], size: u16, offset: u32) -> Option<u32> {
    let data = data.get(offset as usize..)?;
    match size {
        WORD => data.first_chunk().map(|bytes| u32::from_be_bytes(*bytes)),
        HALF => data.first_chunk().map(|bytes| u16::from_be_bytes(*bytes).into()),
        _ => data.first().map(|&byte| byte.into()),
    }
}

/// Result of an arithmetic operation; `None` for a division by zero.
fn calculate(operation: u16, a: u32, operand: u32) -> Option<u32> {
    Some(match operation {
        ADD => a.wrapping_add(operand),
        SUB => a.wrapping_sub(operand),
        MUL => a.wrapping_mul(operand),
        DIV => a.checked_div(operand)?,
        MOD => a.checked_rem(operand)?,
        OR => a | operand,
        AND => a & operand,
        LSH => a.checked_shl(operand).unwrap_or(0),
        RSH => a.checked_shr(operand).unwrap_or(0),
        XOR => a ^ operand,
        _ => a.wrapping_neg(),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn op(code: u16, jt: u8, jf: u8, k: u32) -> FilterInstruction {
        FilterInstruction { code, jt, jf, k }
    }

    /// `udp port 53` of libpcap on Ethernet.
    fn udp_port_53() -> Vec<FilterInstruction> {
        vec![
            op(0x28, 0, 0, 12),
            op(0x15, 0, 6, 0x86dd),
            op(0x30, 0, 0, 20),
            op(0x15, 0, 15, 17),
            op(0x28, 0, 0, 54),
            op(0x15, 12, 0, 53),
            op(0x28, 0, 0, 56),
            op(0x15, 10, 11, 53),
            op(0x15, 0, 10, 0x800),
            op(0x30, 0, 0, 23),
            op(0x15, 0, 8, 17),
            op(0x28, 0, 0, 20),
            op(0x45, 6, 0, 0x1fff),
            op(0xb1, 0, 0, 14),
            op(0x48, 0, 0, 14),
            op(0x15, 2, 0, 53),
            op(0x48, 0, 0, 16),
            op(0x15, 0, 1, 53),
            op(0x06, 0, 0, 262_144),
            op(0x06, 0, 0, 0),
        ]
    }

    #[test]
    fn selects_packets_of_both_families() {
        let filter = CaptureFilter::new(udp_port_53()).unwrap();
        for (port, expected) in [(53_u16, true), (54, false)] {
            let mut v4 = [0; 60];
            v4[12..14].copy_from_slice(&[8, 0]);
            (v4[14], v4[23]) = (0x46, 17);
            v4[40..42].copy_from_slice(&port.to_be_bytes());
            assert_eq!(filter.matches(&v4, 60), expected);
            let mut v6 = [0; 62];
            v6[12..14].copy_from_slice(&[0x86, 0xdd]);
            v6[20] = 17;
            v6[56..58].copy_from_slice(&port.to_be_bytes());
            assert_eq!(filter.matches(&v6, 62), expected);
        }
        assert!(!filter.matches(&[], 0), "a load outside the frame");
    }

    #[test]
    fn refuses_invalid_programs() {
        let ret = op(0x06, 0, 0, 1);
        for (program, expected) in [
            (vec![], FilterError::Length(0)),
            (vec![ret; MAX_FILTER_INSTRUCTIONS + 1], FilterError::Length(1025)),
            (vec![op(0x05, 0, 0, u32::MAX), ret], FilterError::Jump(0)),
            (vec![op(0x15, 1, 0, 0), ret], FilterError::Jump(0)),
            (vec![op(0x60, 0, 0, 16), ret], FilterError::Instruction(0)),
            (vec![op(0x34, 0, 0, 0), ret], FilterError::Instruction(0)),
            (vec![op(0xffff, 0, 0, 0), ret], FilterError::Instruction(0)),
            (vec![op(0x00, 0, 0, 1)], FilterError::NoReturn),
        ] {
            assert_eq!(CaptureFilter::new(program).map(|_| ()), Err(expected));
        }
    }

    proptest! {
        #[test]
        fn checked_programs_end(
            words in prop::collection::vec(any::<(u8, u8, u8, u32)>(), 1..40),
            data in prop::collection::vec(any::<u8>(), 0..64),
        ) {
            let mut program: Vec<_> = words
                .into_iter()
                .map(|(code, jt, jf, k)| op(code.into(), jt % 8, jf % 8, k % 64))
                .filter(|instruction| instruction.is_valid())
                .collect();
            program.extend([op(0x06, 0, 0, 1); 70]);
            let filter = CaptureFilter::new(program).unwrap();
            filter.matches(&data, data.len());
        }
    }
}
