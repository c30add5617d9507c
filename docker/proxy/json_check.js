// Passes JSON on to the server unless that could hurt it. tritonserver 24.10 parses by recursion, and 50,000 brackets in
// 100 kB end it; and for an input whose values are in the JSON it takes the memory that the shape asks for, before it
// counts the values: shapes of 2^33 and of 2^62 values end it.

const MAX_DEPTH = 16;
const MAX_VALUES = 536870912; // of a tensor after the JSON: 1 GiB of FP16

const STRING = '"(?>[^"\\\\]++|\\\\[\\s\\S])*+"';
const OTHER = '[^"\\[\\]{}]++';

// Text whose brackets are nested no deeper than `depth`; brackets in strings are text. Nothing is matched twice.
function nested(depth) {
    const within = depth > 0 ? `|[\\[{]${nested(depth - 1)}[\\]}]` : '';
    return `(?>${OTHER}|${STRING}${within})*+`;
}

const SHALLOW = new RegExp(`^${nested(MAX_DEPTH)}$`);
const STRINGS = new RegExp(STRING, 'g');

function isShallow(text) {
    try {
        return SHALLOW.test(text);
    } catch (limit) { // of PCRE's steps: millions of brackets
        return false;
    }
}

function numMembers(value) {
    if (value === null || typeof value !== 'object') {
        return 0;
    }
    const keys = Array.isArray(value) ? [] : Object.keys(value);
    const within = Array.isArray(value) ? value : keys.map((key) => value[key]);
    return within.reduce((sum, each) => sum + numMembers(each), keys.length);
}

// Whether each member stands there once: of two, the server reads the first, and JSON.parse the last.
function hasUniqueMembers(text, value) {
    return text.replace(STRINGS, '').split(':').length - 1 === numMembers(value);
}

function isFair(input, maxValues) {
    if (!Array.isArray(input.shape)) {
        return input.shape === undefined; // which is the server's to refuse
    }
    const most = input.data === undefined ? MAX_VALUES : maxValues;
    let size = 1;
    return input.shape.every((dim) => {
        size *= Math.max(dim, 1);
        return Number.isInteger(dim) && dim >= 0 && size <= most;
    });
}

// The reason why an inference's JSON does not pass; empty if it does.
function refusal(text) {
    if (!isShallow(text)) {
        return `the body is not JSON of at most ${MAX_DEPTH} levels`;
    }
    let call;
    try {
        call = JSON.parse(text);
    } catch (error) {
        return 'the body is not JSON';
    }
    if (!hasUniqueMembers(text, call)) {
        return 'a member stands twice in the body';
    }
    const inputs = call !== null && Array.isArray(call.inputs) ? call.inputs : [];
    if (!inputs.every((input) => input === null || typeof input !== 'object' || isFair(input, text.length))) {
        return 'the shape of an input asks for more values than the body can have';
    }
    const outputs = call !== null && Array.isArray(call.outputs) ? call.outputs : [];
    const isClassified = (output) => output && output.parameters && output.parameters.classification !== undefined;
    return outputs.some(isClassified) ? 'outputs are not classified here' : '';
}

function passUnless(request, reason) {
    if (reason) {
        request.return(400, JSON.stringify({error: reason}));
    } else {
        request.internalRedirect(request.variables.checked);
    }
}

// requestText raises, which is a status 500, where the body is not in memory.
function passShallow(request) {
    passUnless(request, isShallow(request.requestText) ? '' : `the body is not JSON of at most ${MAX_DEPTH} levels`);
}

function passInference(request) {
    passUnless(request, refusal(request.requestText));
}

export default { passShallow, passInference, refusal };
