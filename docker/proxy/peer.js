// Names a peer to the server, in the header `x-multilora-client`: the secret that only the two have, a space, and the
// peer's address. One that has IPv6 has a network of 2^64 addresses, and goes by that.

import fs from 'fs';

function network(request) {
    const address = request.rawVariables.binary_remote_addr;
    if (address.length === 4) {
        return request.remoteAddress;
    }
    const groups = [0, 2, 4, 6].map((place) => address.readUInt16BE(place).toString(16));
    return `${groups.join(':')}::/64`;
}

function name(request) {
    return `${fs.readFileSync('/secret/client', 'utf8').trim()} ${network(request)}`;
}

// The JSON of a request to generate with the name as its first member: tritonserver passes no header of these on.
function namedJson(request) {
    const member = `"x-multilora-client":"${name(request)}"`;
    return request.requestText.replace(/^\s*\{\s*(\}?)/, (_, end) => `{${member}${end || ','}`);
}

export default { name, namedJson };
