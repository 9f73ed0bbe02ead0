//! Inner loops in a disassembly, as `objdump -d -M intel --no-show-raw-insn` prints it.
//!
//! A loop is a set of instructions in which each can be reached from every other. Removing its
//! entry leaves the inner loops. The innermost loops that multiply vectors count: a
//! kernel spends its time there, and their instructions per byte of weights are the same on every
//! machine.

use std::collections::HashSet;

/// Vector instructions that multiply and add.
const PRODUCTS: [&str; 7] = ["vfmadd", "vfnmadd", "vdpbf16ps", "vpdpbusd", "vpmaddubsw", "vpmaddwd", "tdpbf16ps"];
/// Bytes of a tile register.
const TILE_BYTES: usize = 1024;

/// One iteration of a loop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loop {
    /// Addresses of its products, which identify its function.
    pub products: Vec<u64>,
    /// Without those that only fill space.
    pub instructions: usize,
    /// Bytes read from memory into vectors unchanged, each address once: weights, or keys and
    /// values. Values that are broadcast to all lanes are activations, and values on the stack had
    /// no room in registers.
    pub bytes: usize,
}

struct Instruction<'a> {
    address: u64,
    name: &'a str,
    operands: Vec<&'a str>,
    /// Whether the next instruction cannot be reached from here.
    ends: bool,
}

/// All inner loops of the functions whose mangled name contains `part`.
pub fn find(disassembly: &str, part: &str) -> Vec<Loop> {
    let mut found = Vec::new();
    let mut function = Vec::new();
    let mut wanted = false;
    for line in disassembly.lines() {
        if let Some(symbol) = line.strip_suffix(">:").and_then(|line| line.split_once('<')) {
            found.extend(innermost(&function));
            function.clear();
            wanted = symbol.1.contains(part);
        } else if wanted {
            function.extend(instruction(line));
        }
    }
    found.extend(innermost(&function));
    found
}

/// `  12ab:\tvpdpbusd zmm4,zmm6,DWORD BCST [rdi]`
fn instruction(line: &str) -> Option<Instruction<'_>> {
    let (address, text) = line.split_once(":\t")?;
    let address = u64::from_str_radix(address.trim(), 16).ok()?;
    let never_returns = ["panic", "_fail", "unwind"].iter().any(|part| text.contains(part));
    let text = text.split(['#', '<']).next()?.trim();
    let (name, operands) = text.split_once(' ').unwrap_or((text, ""));
    let operands = operands.split(',').map(str::trim).filter(|operand| !operand.is_empty()).collect();
    let ends = ["jmp", "ret", "ud2", "int3"].contains(&name) || name == "call" && never_returns;
    Some(Instruction { address, name, operands, ends })
}

fn innermost(function: &[Instruction<'_>]) -> Vec<Loop> {
    let mut next: Vec<Vec<usize>> = vec![Vec::new(); function.len()];
    let mut before = next.clone();
    for (index, instruction) in function.iter().enumerate() {
        let follows = (!instruction.ends && index + 1 < function.len()).then_some(index + 1);
        for to in follows.into_iter().chain(jump(function, instruction)) {
            next[index].push(to);
            before[to].push(index);
        }
    }
    let graph = Graph { next, before };
    let mut found = Vec::new();
    let mut open = graph.loops(&(0..function.len()).collect::<Vec<_>>());
    while let Some(body) = open.pop() {
        let multiplies = |body: &[usize]| body.iter().any(|&index| is_product(&function[index]));
        if !multiplies(&body) {
            continue;
        }
        let entry = graph.entry(&body);
        let inside: Vec<usize> = body.iter().copied().filter(|&index| index != entry).collect();
        let inner: Vec<Vec<usize>> = graph.loops(&inside).into_iter().filter(|body| multiplies(body)).collect();
        if inner.is_empty() {
            found.push(measure(&body.iter().map(|&index| &function[index]).collect::<Vec<_>>()));
        }
        open.extend(inner);
    }
    found
}

fn jump(function: &[Instruction<'_>], instruction: &Instruction<'_>) -> Option<usize> {
    let target = u64::from_str_radix(instruction.operands.first().filter(|_| instruction.name.starts_with('j'))?, 16);
    function.binary_search_by_key(&target.ok()?, |instruction| instruction.address).ok()
}

/// Successors and predecessors of instructions.
struct Graph {
    next: Vec<Vec<usize>>,
    before: Vec<Vec<usize>>,
}

impl Graph {
    /// The largest loops of these instructions, in ascending order each (Kosaraju's algorithm).
    fn loops(&self, within: &[usize]) -> Vec<Vec<usize>> {
        let mut left: HashSet<usize> = within.iter().copied().collect();
        let order: Vec<usize> = within.iter().flat_map(|&start| reach(&self.next, start, &mut left)).collect();
        left.extend(within);
        let loops = order.iter().rev().map(|&start| {
            let mut body = reach(&self.before, start, &mut left);
            body.sort_unstable();
            body
        });
        loops
            .filter(|body| body.len() > 1 || body.first().is_some_and(|&only| self.next[only].contains(&only)))
            .collect()
    }

    /// Entry of a loop; if it has none, its first instruction.
    fn entry(&self, body: &[usize]) -> usize {
        let is_entered = |index: &&usize| self.before[**index].iter().any(|from| body.binary_search(from).is_err());
        *body.iter().find(is_entered).unwrap_or(&body[0])
    }
}

/// All of `left` that can be reached from `start`, removed from it, in the order in which a
/// depth-first walk leaves them.
fn reach(edges: &[Vec<usize>], start: usize, left: &mut HashSet<usize>) -> Vec<usize> {
    let mut order = Vec::new();
    let mut path: Vec<(usize, usize)> = left.remove(&start).then_some((start, 0)).into_iter().collect();
    while let Some((at, taken)) = path.last_mut() {
        match edges[*at].get(*taken) {
            Some(&to) => {
                *taken += 1;
                if left.remove(&to) {
                    path.push((to, 0));
                }
            }
            None => {
                order.push(*at);
                path.pop();
            }
        }
    }
    order
}

fn is_product(instruction: &Instruction<'_>) -> bool {
    let is_scalar = instruction.name.ends_with("ss") || instruction.name.ends_with("sd");
    PRODUCTS.iter().any(|name| instruction.name.starts_with(name))
        && (!is_scalar || instruction.name.starts_with("vpdpbusd"))
}

fn measure(body: &[&Instruction<'_>]) -> Loop {
    let counted: Vec<&Instruction<'_>> = body.iter().copied().filter(|instruction| !is_filler(instruction)).collect();
    let mut places = HashSet::new();
    let mut bytes = 0;
    for instruction in &counted {
        if let Some((place, width)) = place_read(instruction)
            && places.insert(place)
        {
            bytes += width;
        }
        // When a register advances, the same operand is another address.
        if let Some(target) = instruction.operands.first().filter(|operand| !operand.contains('[')) {
            places.retain(|place| !place.split(['[', ']', '+', '-', '*']).any(|part| part == *target));
        }
    }
    let products = counted.iter().filter(|instruction| is_product(instruction));
    Loop { products: products.map(|product| product.address).collect(), instructions: counted.len(), bytes }
}

fn is_filler(instruction: &Instruction<'_>) -> bool {
    ["nop", "data16", "cs", "xchg"].contains(&instruction.name)
}

/// The address operand that an instruction reads weights from, and the number of bytes.
fn place_read<'a>(instruction: &Instruction<'a>) -> Option<(&'a str, usize)> {
    if instruction.name.contains("broadcast") {
        return None;
    }
    let operand = instruction.operands.iter().skip(1).find(|operand| operand.contains('['))?;
    if operand.contains("BCST") || operand.contains("{1to") || operand.contains("rsp") || operand.contains("rip") {
        return None;
    }
    // Weights or activations: both are tiles.
    if instruction.name.starts_with("tileload") {
        return Some((operand, TILE_BYTES));
    }
    let width = match operand.split_whitespace().next()? {
        "ZMMWORD" => 64,
        "YMMWORD" => 32,
        "XMMWORD" => 16,
        // A bit for each byte of a vector, or bytes that are widened.
        "QWORD" if instruction.name.starts_with("kmov") || instruction.name.starts_with("vpmov") => 8,
        _ => return None,
    };
    Some((operand, width))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "
0000000000001000 <_ZN12folio_device3cpu4tileE>:
    1000:\txor    eax,eax
    1002:\tnop    WORD PTR [rax+rax*1+0x0]
    1008:\tvmovdqu64 zmm1,ZMMWORD PTR [rdi]
    100e:\tvpandd zmm2,zmm9,ZMMWORD PTR [rdi+0x40]
    1014:\tvpandd zmm3,zmm8,ZMMWORD PTR [rdi+0x40]
    101a:\tkmovq  k1,QWORD PTR [rdi+0x80]
    1020:\tvmovups zmm4,ZMMWORD PTR [rsp+0x40]
    1026:\tvpdpbusd zmm5,zmm1,DWORD BCST [rsi]
    102c:\tvpdpbusd zmm6,zmm2,DWORD PTR [rsi+0x4]{1to16}
    1032:\tvpbroadcastd zmm7,DWORD PTR [rsi+0x8]
    1038:\tadd    rdi,0x88
    103c:\tvfmadd231ps zmm0,zmm7,ZMMWORD PTR [rdi]
    1042:\tdec    rax
    1045:\tjne    1008 <_ZN12folio_device3cpu4tileE+0x8>
    104b:\tvmovups ZMMWORD PTR [rdx],zmm5
    1051:\tdec    rcx
    1054:\tjne    1000 <_ZN12folio_device3cpu4tileE>
    105a:\tret

0000000000003000 <_ZN5tiles4loopE>:
    3000:\ttileloadd tmm4,[rdi+rcx*1]
    3006:\ttileloadd tmm6,[rsi+rdx*1]
    300c:\ttdpbf16ps tmm0,tmm4,tmm6
    3012:\tjne    3000 <_ZN5tiles4loopE>

0000000000002000 <_ZN5other4loopE>:
    2000:\tvfmadd231ps zmm0,zmm7,ZMMWORD PTR [rdi]
    2006:\tjne    2000 <_ZN5other4loopE>
";

    #[test]
    fn the_innermost_loop_that_multiplies() {
        // An address that is read twice counts once, and once more after its register advanced;
        // stack and broadcasts do not.
        let expected = Loop { products: vec![0x1026, 0x102c, 0x103c], instructions: 12, bytes: 64 + 64 + 8 + 64 };
        assert_eq!(find(TEXT, "12folio_device3cpu"), [expected]);
        assert_eq!(find(TEXT, "5other").len(), 1);
        let tiles = Loop { products: vec![0x300c], instructions: 4, bytes: 2 * TILE_BYTES };
        assert_eq!(find(TEXT, "5tiles"), [tiles]);
        assert!(find(TEXT, "nobody").is_empty());
    }

    #[test]
    fn one_instruction_more_shows() {
        let more = TEXT.replace("    1038:", "    1037:\tmov    r8,r9\n    1038:");
        assert_eq!(find(&more, "folio_device")[0].instructions, 13);
    }

    #[test]
    fn only_what_comes_round_again_is_a_loop() {
        // An inner loop without products is part of the one that has them.
        let inner = TEXT.replace("    1038:", "    1034:\tdec    rbx\n    1036:\tjne    1034 <x>\n    1038:");
        assert_eq!(find(&inner, "folio_device")[0].instructions, 14);
        // An exit that jumps backwards over code that leads back in is not; nor is a failing check.
        let exit = TEXT.replace("    1038:", "    1034:\tje     1000 <x>\n    1036:\tjo     1056 <x>\n    1038:");
        let exit = exit.replace("    105a:", "    1056:\tcall   9000 <_ZN4core9panicking5panicE>\n    105a:");
        assert_eq!(find(&exit, "folio_device")[0].instructions, 14);
        let none = TEXT.replace("jne    1008", "jne    104b").replace("jne    1000", "jne    105a");
        assert!(find(&none, "3cpu").is_empty());
    }
}
